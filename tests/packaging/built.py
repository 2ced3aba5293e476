"""What `make deb` and `make wheel` have built, for the tests of `make test-all`."""

from pathlib import Path

import pytest

from tests.support.rotation import EVERYTHING

ROOT = Path(__file__).parents[2]
WHEELHOUSE = ROOT / "build/wheelhouse"
"""Folder of the packages that the wheel needs: shards of tests have no network."""

only_when_built = pytest.mark.skipif(not EVERYTHING, reason="`make test-all` builds what it tests")


def the_only(pattern: str, target: str) -> Path:
    """The file of ``build/`` that matches a pattern, which the Makefile's ``target`` makes."""
    found = list((ROOT / "build").glob(pattern))
    assert len(found) == 1, f"build/{pattern}: {len(found)} files; `make {target}` makes one"
    return found[0]
