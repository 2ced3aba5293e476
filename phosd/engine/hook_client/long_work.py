"""Wait, while a program runs, until long work on its devices is about to end.

With closed gates the program would stand still for work of its own: a kernel that runs for seconds
has to end, whatever is held. So long work is awaited with open gates. The next of it is taken to
last as long as the one before, as the kernels of a loop do, and the gates are closed just before
its end: later, it would be followed by another one.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from phosd.engine.hook_client.link import HookLink
from phosd.engine.job.progress import Progress
from phosd.errors import Busy

LONG = 1.0
"""Seconds for which gates are closed before work counts as long. Queues of short kernels, which are
never empty, take less; to wait for their end would not help.
"""
_MARGIN = 0.02
"""How much before the expected end the gates are closed, as a share of the work's length."""
_POLL = 0.005
_FEW = 10
"""Launches in :data:`LONG`, at most, of a program that has long kernels: they may follow each other
with some short ones between them. A queue of short kernels has many more.
"""
_LOOKS = 10
"""How often it is looked what follows, within :data:`LONG`."""


def unfinished(links: Sequence[HookLink]) -> dict[int, float]:
    """Return the processes with unfinished work of the time before their gates were closed last,
    and for how many seconds it has been awaited.
    """
    told = ((link.pid, link.unfinished()) for link in links)
    return {pid: seconds for pid, seconds in told if seconds}


def await_end(
    links: Sequence[HookLink],
    progress: Progress,
    deadline: float,
    close: Callable[[], object],
    open_: Callable[[], object],
) -> bool:
    """Return when the long work of the program is about to end, with open gates; and whether it is
    long kernels again and again, rather than many short ones, or one alone.

    They are closed when this is called. ``close`` begins to close them, so that hooks note what has
    been submitted. Raises :class:`Busy` if the present work does not end within ``deadline``
    seconds; work that follows is awaited for twice as long at most.
    """
    began = time.monotonic()
    with _running(progress):
        open_()
        if late := _await(links, progress, deadline):
            raise Busy(
                f"the program did not come to rest within {deadline:g} s (process {late} keeps its "
                "GPU busy)",
                hint="the program goes on; try again, or give a longer deadline",
            )
        launched = _launches(links, math.ceil(2 * deadline))
        for _ in range(_LOOKS):  # the program may be between two kernels
            close()
            open_()
            noted = time.monotonic()
            ended = not _await(links, progress, 2 * deadline)
            length = time.monotonic() - noted
            if length > LONG:
                break
            time.sleep(LONG / _LOOKS)
        again = ended and length > LONG
        few = again and _launches(links) - launched <= _FEW * length / LONG
        if again:
            end = noted + (2 - _MARGIN) * length
            while (left := end - time.monotonic()) > 0:
                progress.check()
                time.sleep(min(left, _POLL))
        waited = time.monotonic() - began
    progress.note(f"waited {waited:.1f} s for long kernels of the program, while it ran")
    return few


def _launches(links: Sequence[HookLink], count_seconds: int = 0) -> float:
    return sum(link.launch_count(count_seconds) for link in links)


def _await(links: Sequence[HookLink], progress: Progress, seconds: float) -> int:
    """Wait until all that was noted is done. Returns a process whose work is late, or 0."""
    give_up = time.monotonic() + seconds
    while late := unfinished(links):
        if time.monotonic() > give_up:
            return min(late)
        progress.check()
        time.sleep(_POLL)
    return 0


@contextmanager
def _running(progress: Progress) -> Iterator[None]:
    """Count the time inside as one in which the program runs."""
    stopped = progress.phases[-1] if progress.phases else None
    progress.phase("prepare")
    yield
    if stopped is not None:
        progress.phase(stopped.name, stopped=stopped.stopped)
