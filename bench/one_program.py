"""What benchmarks of one deterministic program in memory have in common: words, and a folder."""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with what all of them take."""
    made = argparse.ArgumentParser(description=doc)
    made.add_argument("--against", type=int, default=20, help="lines (%(default)s)")
    made.add_argument("--memory-tier", default="30G")
    made.add_argument("--state", type=Path, default=Path("/var/tmp"))
    made.add_argument("program", nargs="+")
    return made


def run(
    made: argparse.ArgumentParser, case: Callable[[argparse.Namespace, Path], dict[str, Any]]
) -> None:
    """Run a case in a folder of its own, and print what it returns."""
    arguments = made.parse_args()
    arguments.torchrun = 0
    with tempfile.TemporaryDirectory(
        prefix="phos-bench-", dir=arguments.state, ignore_cleanup_errors=True
    ) as name:
        print(json.dumps(case(arguments, Path(name))))
