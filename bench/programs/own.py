"""Tell what comes of the checkpoints of a program that has safe points, for the benchmarks.

It prints a line for each: ``before N``, ``after N`` and ``restored N`` when phosd's callables are
called, with how often they were by now; ``own OUTCOME SECONDS`` when the program has saved itself,
with the seconds for which it waited; ``end BEFORE AFTER RESTORED`` at its end.
"""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from phosd import program
from phosd.adapters.steps import Steps


class Told:
    """Prints the lines, from now on."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter(before=0, after=0, restored=0)
        program.before_checkpoint(partial(self._called, "before"))
        program.after_checkpoint(partial(self._called, "after"))
        program.after_restore(partial(self._called, "restored"))
        # The adapters call it themselves, and drop what it returns.
        program.checkpoint = self._timed(program.checkpoint)

    def end(self) -> None:
        """Print the last line."""
        program.end_safe_points()
        print("end", *self._counts.values(), flush=True)

    def _called(self, which: str) -> None:
        self._counts[which] += 1
        print(which, self._counts[which], flush=True)

    @staticmethod
    def _timed(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def timed(**options: Any) -> Any:
            began = time.monotonic()
            outcome = checkpoint(**options)
            print("own", outcome, f"{time.monotonic() - began:.6f}", flush=True)
            return outcome

        return timed


def steps(every: int) -> Steps:
    """Return the safe points of a program that saves itself each so many steps. A checkpoint that
    fails ends it.
    """
    return Steps(every, strict=True)
