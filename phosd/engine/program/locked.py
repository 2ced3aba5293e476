"""Hold processes locked by the driver, which are checkpointed when their threads are held."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from phosd.engine.job.rollback import Undo
from phosd.engine.memory.reservation import Reservation
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.driver_checkpoint import State
from phosd.errors import PhosError

_log = logging.getLogger(__name__)


class Locked:
    """Processes that the driver has locked, to be checkpointed when their threads are held.

    The driver is not asked for the state of who is held, as far as it is known.
    """

    def __init__(self, pids: Sequence[int], reservation: Reservation, undo: Undo) -> None:
        self._pids = pids
        self._reservation = reservation
        self._undo = undo
        self._restoring = Undo()
        self._known: State | None = None
        self.restore_threads: dict[int, int] = {}
        """The thread of each process that does the driver's work."""
        undo.add(reservation.end)
        undo.add(driver_checkpoint.together, self._back_to_running, pids)
        undo.add(self.restore)
        self._restoring.add(self._restore_all)
        self._restoring.add(reservation.claim_back)

    def lock(self) -> None:
        """Lock them, with a turn on their GPUs."""
        with self._becoming(State.LOCKED):
            driver_checkpoint.lock_in_turn(self._pids, self._reservation)
        self.restore_threads = driver_checkpoint.restore_threads(self._pids)

    def checkpoint(self) -> None:
        """Checkpoint them, and reserve the memory that becomes free."""
        with self._becoming(State.CHECKPOINTED):
            driver_checkpoint.checkpoint_all(self._pids, self._reservation)

    def move(self, to: Sequence[int]) -> None:
        """Move all of them or none, as :func:`~.driver_checkpoint.checkpointed` has it."""
        with self._becoming(State.LOCKED):
            driver_checkpoint.move_all(self._pids, self._reservation, self._restoring, to)

    def restore(self) -> None:
        """Restore those that are checkpointed, where they were; they are LOCKED then.

        Called again, it does nothing.
        """
        with self._restoring:
            pass

    def bring_back(self) -> None:
        """Restore those that are checkpointed, and unlock all.

        Called again, it does nothing: they run, and may have been stopped since; then they would
        not answer.
        """
        with self._undo:
            pass

    def _restore_all(self) -> None:
        if self._known is State.LOCKED:
            return
        asleep = self._known is State.CHECKPOINTED
        bring = driver_checkpoint.restore if asleep else driver_checkpoint.bring_to_locked
        try:
            with self._becoming(State.LOCKED):
                driver_checkpoint.together(bring, self._pids)
        except PhosError as error:  # the next step tries again, and tells what comes of it
            _log.warning("not all processes are restored yet: %s", error)

    def _back_to_running(self, pid: int) -> None:
        try:
            if self._known is State.LOCKED:
                driver_checkpoint.unlock(pid)
                return
        except PhosError as error:
            _log.warning("process %d is not back yet: %s", pid, error)
        driver_checkpoint.bring_to_running(pid)

    @contextmanager
    def _becoming(self, state: State) -> Iterator[None]:
        self._known = None
        yield
        self._known = state


@contextmanager
def locked(pids: Sequence[int], reservation: Reservation) -> Iterator[Locked]:
    """Lock the processes inside; at the end they are RUNNING again, even after an error."""
    with Undo() as undo:
        processes = Locked(pids, reservation, undo)
        processes.lock()
        yield processes
