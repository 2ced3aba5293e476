"""Print what a program computes, a line for each step, for the benchmarks to compare."""

import time
from collections.abc import Callable, Iterable
from itertools import islice


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


def print_lines(
    values: Iterable[float], steps: int = 0, after: Callable[[int], object] | None = None
) -> None:
    """Print a line for each value, or for the first ``steps``; call ``after`` behind each, with how
    many there are.
    """
    lines = Lines()
    for number, value in enumerate(islice(values, steps or None), 1):
        lines.add(value)
        if after is not None:
            after(number)
