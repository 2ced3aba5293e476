"""Reserve device memory for processes while the driver has them off their GPUs, and lock GPUs.

The driver's restore is final if it finds too little memory (hazard 19), so movers reserve what its
checkpoint freed. The amount is the difference of the GPU's free memory before and after. Programs
therefore leave and return one at a time on each GPU: otherwise the memory of one would be reserved
for another. What its checkpoint itself needs, movers keep until then (hazard 51).
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.exported import if_alive
from phosd.engine.mover.client.mover import ROOM, Mover
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, OutOfMemory, PhosError
from phosd.units import human_bytes

_log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.05
_BACK_SECONDS = 60.0
"""Seconds that a returning program waits for the locks of its GPUs, so that another program which
the driver never releases cannot block it for ever.
"""


def require_room(gpu: int, free: int) -> None:
    """Raise :class:`OutOfMemory` if ``free`` bytes of a GPU are too few for the driver to take a
    program off it, or to bring back one that knows it.
    """
    if free < ROOM:
        raise OutOfMemory(
            f"GPU {gpu} has {human_bytes(free)} of memory free, and the driver needs "
            f"{human_bytes(ROOM)} there to save a program and to bring it back, also one that "
            "does not use it",
            hint="the program goes on unharmed; try again when another program has freed memory",
        )


class GpuLocks:
    """Locks for work that only one job at a time may do on a GPU of the node. Thread-safe."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._changed = threading.Condition()

    def acquire(self, gpus: Collection[int], seconds: float = 0.0) -> bool:
        """Lock all of these GPUs within ``seconds``, or none. Returns whether they are locked."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._taken.isdisjoint(gpus), seconds):
                return False
            self._taken |= set(gpus)
            return True

    def release(self, gpus: Collection[int]) -> None:
        """Unlock GPUs that :meth:`acquire` locked."""
        with self._changed:
            self._taken -= set(gpus)
            self._changed.notify_all()

    @contextlib.contextmanager
    def locked(
        self,
        gpus: Collection[int],
        progress: Progress,
        limit: float | None = None,
        waiting: str = "",
    ) -> Iterator[None]:
        """Lock these GPUs inside the context.

        Raises :class:`Cancelled`, and :class:`Busy` after ``limit`` seconds. ``waiting`` is noted
        in ``progress`` if the locks are not free at once.
        """
        give_up = None if limit is None else time.monotonic() + limit
        ours = self.acquire(gpus)
        if not ours and waiting:
            progress.note(waiting)
        while not ours and not self.acquire(gpus, _LOOK_SECONDS):
            progress.check()
            if give_up is not None and time.monotonic() > give_up:
                raise Busy(
                    "other programs were being taken off, or brought back to, GPU"
                    f" {', '.join(map(str, sorted(gpus)))} for {limit:.0f} s",
                    hint="the program goes on unharmed; try again when their jobs have ended",
                )
        try:
            yield
        finally:
            self.release(gpus)


class Reservation:
    """Reserve a group's device memory on the GPUs of ``movers`` while the driver has its processes.

    ::

        present  --begin-->       leaving    wait, and begin again, when the locks are not free
        leaving  --hold-->        reserved   after the driver's checkpoint
        leaving, reserved  --claim_back-->  returning    before the driver's restore
        returning  --hold-->      reserved   it has not brought all of them back
        returning  --end-->       present    after it
        reserved  --release-->    absent     the processes do not return to these GPUs

    The GPUs are locked while the group is leaving or returning. :meth:`claim_back` and :meth:`end`
    may be called in any state, and change nothing in those where they have nothing to do.
    """

    def __init__(
        self,
        locks: GpuLocks,
        movers: Iterable[Mover],
        processes: Collection[ProcessId],
        progress: Progress,
        limit: float | None = None,
    ) -> None:
        """``movers``: of each GPU a living one counts. ``limit``: the seconds that :meth:`wait` may
        take; None while the group runs.
        """
        self._locks = locks
        self._movers = tuple({mover.gpu: mover for mover in movers if mover.alive}.values())
        self._gpus = frozenset(mover.gpu for mover in self._movers)
        self._processes = processes
        self._progress = progress
        self._limit = limit
        self._free: dict[Mover, int] = {}
        self._lent: list[Mover] = []
        self._left = False
        self._ours = False

    def begin(self) -> bool:
        """Lock the GPUs and record their free memory, once the processes allocate no more.

        Returns False if another program is leaving or returning; this one must not leave yet.
        Raises :class:`OutOfMemory`; see :func:`require_room`.
        """
        if not self._locks.acquire(self._gpus):
            return False
        self._left = self._ours = True
        for mover in self._movers:
            with self._noted(mover):  # the mover is dead; all that it had to save is saved
                self._lend(mover)
                self._free[mover] = mover.free_memory()[0]
        for mover, free in self._free.items():
            require_room(mover.gpu, free)
        return True

    def wait(self) -> None:
        """Wait until the locks are free. Raises :class:`Busy` and :class:`Cancelled`."""
        with self._locks.locked(self._gpus, self._progress, self._limit):
            pass

    def hold(self) -> None:
        """Reserve the memory that the driver's checkpoint freed, until all processes have ended. If
        some of them have returned, that is what the others need.
        """
        for mover, free in self._free.items():
            with self._noted(mover):
                gained = mover.free_memory()[0] - free
                if gained > 0:
                    mover.reserve(gained, self._processes)
        self.end()

    def release(self) -> None:
        """Release the reserved memory."""
        with Undo() as each:
            for mover in self._free:
                each.add(if_alive, mover, partial(mover.unreserve, self._processes))

    def claim_back(self) -> None:
        """Lock the GPUs, then release the reserved memory and what the movers keep: only these
        processes can take it.
        """
        if not self._left:
            return
        self._left = False
        self._ours = self._ours or self._locks.acquire(self._gpus, _BACK_SECONDS)
        with Undo() as each:
            each.add(self.release)
            for mover in self._free:
                each.add(if_alive, mover, partial(self._lend, mover))

    def end(self) -> None:
        """Let the movers keep their room again, and unlock the GPUs: other programs may leave and
        return.
        """
        while self._lent:
            mover = self._lent.pop()
            with self._noted(mover):
                mover.keep_room()
        if self._ours:
            self._ours = False
            self._locks.release(self._gpus)

    def fits(self, processes: int) -> bool:
        """Return whether so many processes may leave at the same time: each may need the room."""
        return all(free >= processes * ROOM for free in self._free.values())

    def _lend(self, mover: Mover) -> None:
        self._lent.append(mover)
        mover.lend_room()

    @contextlib.contextmanager
    def _noted(self, mover: Mover) -> Iterator[None]:
        try:
            yield
        except PhosError as error:
            self._progress.note(f"no device memory could be reserved on GPU {mover.gpu}: {error}")


@contextlib.contextmanager
def lent_room(movers: Iterable[Mover]) -> Iterator[None]:
    """Let movers lend the driver, inside the context, what they keep for it (hazard 51).

    A mover that fails is left alone: whoever moves does not depend on it.
    """
    asked = [*movers]
    for mover in asked:
        _try(mover, mover.lend_room)
    try:
        yield
    finally:
        for mover in asked:
            _try(mover, mover.keep_room)


def _try(mover: Mover, ask: Callable[[], None]) -> None:
    try:
        ask()
    except PhosError as error:
        _log.warning("the data mover of GPU %d: %s", mover.gpu, error)


@contextlib.contextmanager
def reserve_ahead(
    needs: Mapping[Mover, int], processes: Collection[ProcessId]
) -> Iterator[Callable[[], None]]:
    """Reserve bytes of device memory on these movers' GPUs for processes that will move there.

    Call the yielded function just before they move, to release it. Raises :class:`OutOfMemory`.
    """
    with Undo() as undo:

        def release() -> None:
            for mover in needs:
                if_alive(mover, partial(mover.unreserve, processes))

        undo.add(release)
        for mover, size in needs.items():
            if size:
                mover.reserve(size, processes)
        yield release
