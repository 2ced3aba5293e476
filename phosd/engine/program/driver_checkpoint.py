"""Run the driver's own checkpoint: contexts, streams, modules and memory that is not parked.

The states and their order are the driver's: RUNNING -lock-> LOCKED -checkpoint-> CHECKPOINTED
-restore-> LOCKED -unlock-> RUNNING.
"""

import ctypes
import enum
import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from phosd.engine.faults import Point, point
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.reservation import Reservation
from phosd.engine.system import device_nodes, procfs, stopped_state
from phosd.engine.system.cuda import call, driver, gpu_uuid
from phosd.engine.system.freezer import frozen_for
from phosd.engine.system.procfs import ProcessId
from phosd.engine.system.unkillable_reads import at_once
from phosd.errors import Busy, Internal, NoSuchProcess, PhosError, Timeout

LOCK_LIMITS_MS = (1_000, 3_000, 10_000)
"""How long the locks of a group may take, for each try. A lock waits for the work in flight, which
may itself wait for work that the program is kept from launching.
"""
TELLING_SECONDS = 60.0
"""Seconds that a process may take to tell its state: it does not while the driver restores it."""
BACK_SECONDS = 300.0
"""Seconds that the driver may take to bring processes back that nobody waits for but recovery."""
GpuPairs = tuple[tuple[str, str], ...]
"""UUIDs of GPUs, old and new: of every GPU that the driver knew in the process (its
``cuCheckpointProcessRestore`` refuses fewer), each once.
"""
_log = logging.getLogger(__name__)
_untold: set[ProcessId] = set()
"""Processes whose state the driver did not tell, as the log says."""
RETRY_PAUSE = 0.1
"""Seconds between two tries, in which programs launch what they were kept from."""


class State(enum.Enum):
    """The driver's state of a process."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    UNKNOWN = -1
    """The driver answered with an error, or was not asked: no thread of the process runs, and it
    would wait for one for ever."""


def state(pid: int) -> State | None:
    """Return the driver's state of ``pid``; None if it is no CUDA process, or is ending.

    A process that phosd has frozen is not asked: its program is hollow, so the driver has nothing.
    """
    if frozen_for(pid):
        return State.RUNNING
    if stopped_state.stands_still(pid):
        return None if procfs.process_id(pid) is None else State.UNKNOWN
    bindings = driver()
    ask = partial(bindings.cuCheckpointProcessGetState, pid)
    try:  # it may be stopped after that look: CRIU lets go a stopped one a moment before it stops
        status, value = stopped_state.answer(pid, ask, changes=False)
    except Busy:
        return State.UNKNOWN
    if status == bindings.CUresult.CUDA_SUCCESS:
        return State(int(value))
    # docs/design/driver.md: others-have-no-state. One that ends while it is asked is not there
    # either; INVALID_VALUE is documented.
    kinds = bindings.CUresult
    without = (kinds.CUDA_ERROR_NOT_INITIALIZED, kinds.CUDA_ERROR_INVALID_VALUE)
    if status in without or procfs.ending(pid):
        return None
    process = procfs.process_id(pid)
    if process is not None and process not in _untold:
        _untold.add(process)
        _log.warning("the driver does not tell the state of process %d: %s", pid, status.name)
    return State.UNKNOWN


def states(pids: Iterable[int], seconds: float | None = None) -> dict[int, State | None]:
    """Return :func:`state` of each process of which the driver tells it in time, as the process
    itself must.
    """
    told = at_once(pids, state, TELLING_SECONDS if seconds is None else seconds)
    return {pid: found for pid, found in told.items() if found is not State.UNKNOWN}


def lock(pid: int, limit: int = LOCK_LIMITS_MS[-1]) -> None:
    """Hold the process at its next CUDA call, and wait for the work it has submitted.

    Raises :class:`Timeout` after ``limit`` milliseconds; the process is not locked then. This and
    the next three raise :class:`Busy` if the process is stopped.
    """
    point(Point.DRIVER_LOCK)
    arguments = driver().CUcheckpointLockArgs()
    arguments.timeoutMs = limit
    _ask("cuCheckpointProcessLock", pid, arguments)


def checkpoint(pid: int) -> None:
    """Move the process's GPU state into its host memory, and release the GPU."""
    point(Point.DRIVER_CHECKPOINT)
    stopped_state.await_going(pid)  # also if it is frozen: it would do it alone when it goes on
    _ask("cuCheckpointProcessCheckpoint", pid, None)


def restore(pid: int, pairs: GpuPairs = ()) -> None:
    """Bring the GPU state back from host memory, on the same GPUs, or by ``pairs`` on others.

    In a container the driver knows only the GPUs that were given to it.
    """
    pairs = tuple((old, new) for old, new in pairs if device_nodes.sees(pid, old))
    stopped_state.await_going(pid)  # as above, and perhaps without enough memory by then
    _ask("cuCheckpointProcessRestore", pid, _restore_arguments(pairs) if pairs else None)


def unlock(pid: int) -> None:
    """Let the process call CUDA again."""
    _ask("cuCheckpointProcessUnlock", pid, None)


def _ask(name: str, pid: int, arguments: Any) -> None:
    """Let the process itself do a step: while it is stopped, the driver waits for it for ever."""
    stopped_state.answer(pid, partial(call, name, pid, arguments, about=f"process {pid}"))


def restore_threads(pids: Iterable[int]) -> dict[int, int]:
    """Return the thread of each process that does the driver's work; a process that a tracer holds
    has one, too.
    """
    return {pid: _restore_thread(pid) for pid in pids}


def _restore_thread(pid: int) -> int:
    thread = int(call("cuCheckpointProcessGetRestoreThreadId", pid, about=f"process {pid}"))
    if not (procfs.PROC / str(pid) / "task" / str(thread)).exists():
        raise Internal(
            f"the driver names thread {thread}, which process {pid} does not have",
            hint="see the driver's log (dmesg)",
        )
    return thread


def restore_all(pids: Sequence[int], pairs: GpuPairs = ()) -> None:
    """Restore checkpointed processes in parallel, as :func:`restore` does; they are LOCKED then.
    All are tried, as in :func:`resume`.
    """
    together(lambda pid: restore(pid, pairs), pids)


def resume(pids: Sequence[int], pairs: GpuPairs = ()) -> None:
    """Restore and unlock checkpointed processes in parallel.

    Every process is tried even if another fails; the first error is raised afterwards.
    """

    def one(pid: int) -> None:
        restore(pid, pairs)
        unlock(pid)

    together(one, pids)


@contextmanager
def checkpointed(
    pids: Sequence[int], reservation: Reservation
) -> Iterator[Callable[[Sequence[int]], None]]:
    """Checkpoint the processes inside; at the end they are RUNNING again, even after an error.

    Yields a function that does :func:`move` for all processes or none: if some cannot move, all are
    restored where they were. ``reservation`` keeps their device memory from other programs.
    """
    with Undo() as undo:
        stop(pids, reservation, undo)
        yield partial(move_all, pids, reservation, undo)


def stop(pids: Sequence[int], reservation: Reservation, undo: Undo) -> None:
    """Checkpoint the processes, until ``undo`` brings them back to RUNNING.

    A caller that drops the steps of ``undo`` must release the ``reservation``.
    """
    undo.add(reservation.end)
    undo.add(_bring_back, pids, reservation)
    undo.add(reservation.claim_back)
    lock_in_turn(pids, reservation)
    checkpoint_all(pids, reservation)


def move(pids: Sequence[int], to: Sequence[int]) -> None:
    """Restore checkpointed processes on other GPUs, which they see; they are LOCKED then.

    ``to`` has, for every GPU of the node by ordinal, the one that replaces it, each once. Every
    process is tried, as in :func:`resume`.
    """
    uuids = [_uuid(ordinal) for ordinal in range(len(to))]
    restore_all(pids, tuple((uuids[old], uuids[new]) for old, new in enumerate(to)))


def _uuid(ordinal: int) -> str:
    return gpu_uuid(bytes(call("cuDeviceGetUuid", call("cuDeviceGet", ordinal)).bytes))


def move_all(pids: Sequence[int], reservation: Reservation, undo: Undo, to: Sequence[int]) -> None:
    """Do :func:`move` for all processes or none: if one cannot, the others are checkpointed again,
    and ``undo`` restores them where they were.
    """
    try:
        move(pids, to)
    except PhosError as error:
        moved = [pid for pid in pids if state(pid) is State.LOCKED]
        undo.add(_move_back, moved, to)
        undo.add(reservation.claim_back)
        for pid in moved:  # now, as the caller has the new GPUs for itself
            try:  # one after the other, as each may need all room that there is
                checkpoint(pid)
            except PhosError as another:
                error.add_note(f"besides, {another}")
        raise


def _move_back(moved: Sequence[int], to: Sequence[int]) -> None:
    """Restore processes on the GPUs that :func:`move` took them from; they are LOCKED then."""
    away = [pid for pid in moved if state(pid) is State.CHECKPOINTED]
    move(away, [to.index(gpu) for gpu in range(len(to))])


def _restore_arguments(pairs: GpuPairs) -> Any:
    bindings = driver()
    made = []
    for old, new in pairs:
        made.append(bindings.CUcheckpointGpuPair())
        for each, text in (("oldUuid", old), ("newUuid", new)):
            value = bindings.CUuuid()
            ctypes.memmove(value.getPtr(), _uuid_bytes(text), 16)  # its bytes can only be read
            setattr(made[-1], each, value)
    arguments = bindings.CUcheckpointRestoreArgs()
    arguments.gpuPairs, arguments.gpuPairsCount = made, len(made)
    return arguments


def _uuid_bytes(text: str) -> bytes:
    return uuid.UUID(text.removeprefix("GPU-")).bytes


def lock_in_turn(pids: Sequence[int], reservation: Reservation) -> None:
    """Lock, with the GPUs' locks. The processes run while they wait for others that leave or
    return.
    """
    _lock(pids)
    while not reservation.begin():
        require_running(pids)
        reservation.wait()
        _lock(pids)


def checkpoint_all(pids: Sequence[int], reservation: Reservation) -> None:
    """Checkpoint locked processes, and reserve the memory that becomes free."""
    if reservation.fits(len(pids)):
        together(checkpoint, pids)
    else:  # each that has left has given its context's memory back
        for pid in pids:
            checkpoint(pid)
    reservation.hold()


def _lock(pids: Sequence[int]) -> None:
    """Lock all processes. Between tries none is locked, as one may wait for a launch of another."""
    *limits, last = LOCK_LIMITS_MS
    for limit in limits:
        try:
            _lock_within(limit, pids)
            return
        except Timeout:
            require_running(pids)
            time.sleep(RETRY_PAUSE)
    _lock_within(last, pids)


def _lock_within(limit: int, pids: Sequence[int]) -> None:
    for pid in pids:
        lock(pid, limit)


def _bring_back(pids: Sequence[int], reservation: Reservation) -> None:
    try:
        require_running(pids)
    except PhosError:
        # What those need that are still away; without it they would be lost. So would one that the
        # driver is about to restore when it goes on, if its memory was reserved.
        if not any(map(stopped_state.is_asked, pids)):
            reservation.hold()
        raise


def require_running(pids: Collection[int]) -> None:
    """Unlock locked processes. Raises :class:`Internal` unless all are RUNNING then."""
    together(bring_to_running, list(pids))


def back_to_locked(pids: Collection[int]) -> dict[int, PhosError | None]:
    """Restore checkpointed processes, as :func:`back_to_running`, and leave them LOCKED."""
    return _back(pids, bring_to_locked)


def back_to_running(pids: Collection[int]) -> dict[int, PhosError | None]:
    """Bring processes back to RUNNING, in parallel. Returns an error for each that is not within
    :data:`BACK_SECONDS`, or that has not told its state yet.
    """
    return _back(pids, bring_to_running)


def _back(pids: Collection[int], step: Callable[[int], None]) -> dict[int, PhosError | None]:
    def one(pid: int) -> PhosError | None:
        try:
            step(pid)
        except PhosError as error:
            return error
        return None

    done = at_once(pids, one, BACK_SECONDS)
    late = {
        pid: Timeout(
            f"the driver has not brought process {pid} back in time",
            hint=f"see what it waits for and the driver's log (dmesg); then `phos recover {pid}`",
        )
        for pid in pids
        if pid not in done
    }
    return {**done, **late}


def bring_to_locked(pid: int) -> None:
    """Restore a process if it is checkpointed."""
    if _clear_state(pid) is State.CHECKPOINTED:
        restore(pid)


def bring_to_running(pid: int) -> None:
    """Bring a process back to RUNNING, whichever state it is in."""
    now = _clear_state(pid)
    if now is State.CHECKPOINTED:
        restore(pid)
    if now is not State.RUNNING:
        unlock(pid)


def _clear_state(pid: int) -> State:
    """Return the state of a process. Raises if it is none from which it can be brought back."""
    stopped_state.await_going(pid)  # nobody is to be left behind who asks no more than this
    now = state(pid)
    while now is State.UNKNOWN and stopped_state.is_still(pid):  # only now
        stopped_state.await_going(pid)
        now = state(pid)
    if now is None:
        raise NoSuchProcess(
            f"process {pid} ended during its checkpoint", hint="see its output for why it ended"
        )
    if now is State.FAILED:
        raise Internal(
            f"the driver could not bring process {pid} back: it is lost",
            hint="end it and restore its last image; the driver's log (dmesg) says more",
        )
    if now is State.UNKNOWN:
        raise Internal(
            f"the driver does not tell the state of process {pid}",
            hint=f"see the driver's log (dmesg); then `phos recover {pid}`",
        )
    return now


def together(action: Callable[[int], None], pids: Sequence[int]) -> None:
    """Run ``action(pid)`` for all in parallel; raise the first error when all have ended."""
    if not pids:
        return
    with ThreadPoolExecutor(max_workers=len(pids)) as pool:
        futures = [pool.submit(action, pid) for pid in pids]
    raise_first(f.exception() for f in futures)


def raise_first(errors: Iterable[BaseException | None]) -> None:
    """Raise the first of these errors, if there is one, with the others as its notes."""
    met = [error for error in errors if error is not None]
    for error in met[1:]:
        met[0].add_note(f"besides, {error}")
    if met:
        raise met[0]
