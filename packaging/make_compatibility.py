"""Write docs/compatibility.md from the benchmark's results (:mod:`bench.compatibility`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.compatibility import PAGE, page


def files() -> dict[Path, str]:
    """Return the page, by its path."""
    return {PAGE: page()}
