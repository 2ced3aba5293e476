"""Turns of programs on a GPU, and room: device memory that is kept for processes while the driver
has them off their GPUs.

The driver's restore is final when it finds too little memory (hazard 19), so movers keep from
others what its checkpoint has set free. How much that is shows in what the GPU has free before and
after. So programs come and go one at a time on each GPU: else one would be given another's room.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.exported import if_alive
from phosd.engine.mover.client.mover import Mover
from phosd.engine.system.procfs import Process
from phosd.errors import Busy, PhosError

_LOOK_SECONDS = 0.05
_BACK_SECONDS = 60.0
"""For how long a program that comes back waits for others. One that the driver does not let go of
shall not keep it for ever."""


class Turns:
    """The GPUs of a node on which somebody does what one at a time may do. Thread-safe."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._changed = threading.Condition()

    def take(self, gpus: Collection[int], seconds: float = 0.0) -> bool:
        """Take the turn on all of these GPUs, or, where that takes longer, on none."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._taken.isdisjoint(gpus), seconds):
                return False
            self._taken |= set(gpus)
            return True

    def end(self, gpus: Collection[int]) -> None:
        """What :meth:`take` took."""
        with self._changed:
            self._taken -= set(gpus)
            self._changed.notify_all()

    @contextlib.contextmanager
    def turn(
        self,
        gpus: Collection[int],
        progress: Progress,
        limit: float | None = None,
        waiting: str = "",
    ) -> Iterator[None]:
        """Inside, the turn on these GPUs is ours. Raises :class:`Cancelled`, and :class:`Busy`
        after ``limit`` seconds. ``waiting`` is a note for who does not have it at once.
        """
        give_up = None if limit is None else time.monotonic() + limit
        ours = self.take(gpus)
        if not ours and waiting:
            progress.note(waiting)
        while not ours and not self.take(gpus, _LOOK_SECONDS):
            progress.check()
            if give_up is not None and time.monotonic() > give_up:
                raise Busy(
                    "other programs were on their way to or from GPU"
                    f" {', '.join(map(str, sorted(gpus)))} for {limit:.0f} s",
                    hint="the program goes on unharmed; try again when their jobs have ended",
                )
        try:
            yield
        finally:
            self.end(gpus)


class Room:
    """Of one group, on the GPUs of ``movers``, for as long as the driver has its ``processes``.

    In this order: :meth:`leave`, the driver's checkpoint, :meth:`keep`; then :meth:`give`, or
    :meth:`come`, the driver's restore, :meth:`over`, whatever has come before.
    """

    def __init__(
        self,
        turns: Turns,
        movers: Iterable[Mover],
        processes: Collection[Process],
        progress: Progress,
        limit: float | None = None,
    ) -> None:
        """``limit`` is how many seconds the group waits for others that leave; None when it runs
        meanwhile.
        """
        self._turns = turns
        self._movers = tuple(movers)
        self._gpus = frozenset(mover.gpu for mover in self._movers)
        self._processes = processes
        self._progress = progress
        self._limit = limit
        self._free: dict[Mover, int] = {}
        self._left = False
        self._ours = False

    def leave(self) -> bool:
        """The processes allocate no more, and are about to leave. False when others are under way
        on these GPUs: then they must not, and :meth:`wait` is for them.
        """
        if not self._turns.take(self._gpus):
            return False
        self._left = self._ours = True
        for mover in self._movers:
            with self._noted(mover):  # it is dead; all that it had to save is saved
                self._free[mover] = mover.free_memory()[0]
        return True

    def wait(self) -> None:
        """Until nobody is under way. Raises :class:`Busy` and :class:`Cancelled`."""
        with self._turns.turn(self._gpus, self._progress, self._limit):
            pass

    def keep(self) -> None:
        """They have left: keep what that has set free, for as long as one of them lives."""
        for mover, free in self._free.items():
            with self._noted(mover):
                gained = mover.free_memory()[0] - free
                if gained > 0:
                    mover.reserve(gained, self._processes)
        self.over()

    def give(self) -> None:
        """Nothing is kept any more."""
        with Undo() as each:
            for mover in self._free:
                each.add(if_alive, mover, partial(mover.unreserve, self._processes))

    def come(self) -> None:
        """They are about to come back, if they have left: what is kept is free, for them alone."""
        if not self._left:
            return
        self._left = False
        self._ours = self._ours or self._turns.take(self._gpus, _BACK_SECONDS)
        self.give()

    def over(self) -> None:
        """Others may come and go."""
        if self._ours:
            self._ours = False
            self._turns.end(self._gpus)

    @contextlib.contextmanager
    def _noted(self, mover: Mover) -> Iterator[None]:
        try:
            yield
        except PhosError as error:
            self._progress.note(f"room for the program is not kept on GPU {mover.gpu}: {error}")


@contextlib.contextmanager
def room_ahead(
    needs: Mapping[Mover, int], processes: Collection[Process]
) -> Iterator[Callable[[], None]]:
    """Keeps so many bytes of device memory for processes that will come to these movers' GPUs.

    Call the function just before they do. Raises :class:`OutOfMemory`.
    """
    with Undo() as undo:

        def give() -> None:
            for mover in needs:
                if_alive(mover, partial(mover.unreserve, processes))

        undo.add(give)
        for mover, size in needs.items():
            if size:
                mover.reserve(size, processes)
        yield give
