"""Print what a program computes, a line for each step, for the benchmarks to compare."""

import time
from collections.abc import Iterable


class Lines:
    """The lines so far: number, value in hexadecimal, seconds, and end on the monotonic clock."""

    def __init__(self) -> None:
        self._number = 0
        self._start = time.monotonic()

    def add(self, value: float) -> None:
        """Print the line of a step that has ended with ``value``."""
        end = time.monotonic()
        seconds = end - self._start
        print(self._number, float(value).hex(), f"{seconds:.6f} {end:.6f}", flush=True)
        self._number += 1
        self._start = time.monotonic()


def print_lines(values: Iterable[float]) -> None:
    """Print a line for each value."""
    lines = Lines()
    for value in values:
        lines.add(value)
