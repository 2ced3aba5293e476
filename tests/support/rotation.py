"""Choose which tests this commit's run plays: of what is random or a product, and of what is slow.

``make test`` plays a part that depends on the commit, so that each commit tries something new;
``make test-all`` (``PHOS_TEST_ALL=1``) plays everything. ``PHOS_TEST_SEED`` chooses another part.
Cases that ever failed are in ``tests/regressions.txt`` and are always played.

A test pays for itself in what it finds a second: the longer it takes, the more seldom it is played,
so that a run stays within its time however many slow tests there are. Those that say whether
anything works at all are marked ``always``.
"""

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar
from zlib import crc32

from tests.support.checkout import git

TESTS = Path(__file__).parent.parent
REGRESSIONS = TESTS / "regressions.txt"
"""Lines ``NAME: CASE``: case ``CASE`` of ``NAME`` has failed once."""

T = TypeVar("T")

EVERYTHING = os.environ.get("PHOS_TEST_ALL") == "1"
SOAK = os.environ.get("PHOS_TEST_SOAK") == "1"


def times(usual: int, *, everything: int, soak: int) -> int:
    """Return how often a test does again what takes seconds: in ``make test``, ``make test-all``
    and ``make soak``.
    """
    if SOAK:
        return soak
    return everything if EVERYTHING else usual


def _seed() -> int:
    """Return the seed of this run: from the environment, else the commit's first 32 bits."""
    if said := os.environ.get("PHOS_TEST_SEED"):
        return int(said)
    head = git("rev-parse", "HEAD")
    return int(head[0][:8], 16) if head else 0  # an unpacked archive has no commit


SEED = _seed()


def regressions(name: str) -> set[str]:
    """Return the cases of ``name`` that have failed once."""
    pairs = (line.partition(": ") for line in REGRESSIONS.read_text().splitlines())
    return {case for key, _, case in pairs if key == name}


def plays(name: str, case: object, of: int) -> bool:
    """Whether this run plays ``case`` of ``name``, of whose cases it plays one in ``of``."""
    if EVERYTHING or str(case) in regressions(name):
        return True
    return crc32(f"{name}: {case}".encode()) % of == SEED % of


SHORT = 0.75
"""Seconds: a test that takes N times as long is played by one of N commits, so that each test costs
a run as much on average.
"""
SELDOMEST = 16
"""No test is played by fewer than one of so many commits."""


def period(seconds: float) -> int:
    """Return of how many commits one plays a test that takes so long."""
    return min(SELDOMEST, max(1, math.floor(seconds / SHORT)))


def part(name: str, cases: Iterable[T], of: int) -> list[T]:
    """Return one in ``of`` of the cases, a different part for each seed modulo ``of``."""
    return [case for case in cases if plays(name, case, of)]


def seeds(name: str, count: int, whole: int) -> list[int]:
    """Return seeds of ``count`` random cases, or of ``whole`` when everything is played: different
    ones for each commit, and those that have failed once.
    """
    first = crc32(f"{name}: {SEED}".encode())
    fresh = range(first, first + (whole if EVERYTHING else count))
    return [*sorted({int(case) for case in regressions(name)} - {*fresh}), *fresh]
