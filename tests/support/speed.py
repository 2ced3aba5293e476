"""Measure how fast this machine is, to judge how long its tests take.

``python3 -m tests.support.speed FILE`` writes the seconds of a fixed piece of work to FILE: of the
interpreter and of a hash, each as fast as it goes in some tries.
"""

import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

REFERENCE = 0.036
"""Seconds of it on the machine on which ``tests/budget.toml`` was written."""
_TRIES = 7


def seconds() -> float:
    """Return the seconds of the work."""
    return _best(lambda: sum(i * i for i in range(700_000))) + _best(
        lambda: hashlib.sha256(bytes(16 << 20)).digest()
    )


def slowness(measured: float) -> float:
    """Return how many times longer than the reference this machine takes; 1 if it does not."""
    return max(1.0, measured / REFERENCE)


def _best(work: Callable[[], object]) -> float:
    found = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return min(found)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(f"{seconds():.4f}\n")
