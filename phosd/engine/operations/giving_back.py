"""Give back what a suspended program had on its GPUs."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from phosd.engine.faults import Point, point
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.errors import PhosError


@contextmanager
def giving_back(
    progress: Progress, inside: AbstractContextManager[object] | None = None
) -> Iterator[Undo]:
    """Do the steps that are added within, the last one first, ``inside`` of another context. What
    fails is noted: the program is suspended nevertheless.
    """
    progress.phase("release", stopped=True)
    try:
        with inside or nullcontext(), Undo() as last_first:
            yield last_first
            point(Point.SUSPEND_RELEASE)
    except (PhosError, OSError) as error:
        progress.note(f"not all that the program had on its GPUs was given back: {error}")
