"""Park processes: unmap their device memory while the driver and CRIU save the rest."""

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.gate import closed_gates
from phosd.engine.hook_client.link import HookLink, HookState
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.device_memory import DeviceMemory
from phosd.engine.memory.exported import Allocation, if_alive
from phosd.engine.memory.handing_back import hand_back
from phosd.engine.system import procfs, stopped_state
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Internal, PhosError, Timeout

_AGAIN_SECONDS = 5.0
"""Seconds for which memory is offered to a program whose hook fails to take it."""
_PAUSE = 0.05


@contextlib.contextmanager
def parked(links: Sequence[HookLink], memory: DeviceMemory) -> Iterator[None]:
    """Park the processes and detach their hooks inside the context.

    At its end each process gets its memory back at the same addresses. The processes must run by
    then, so that their hooks answer. The movers guard the memory from before the park until after
    that.
    """
    with Undo() as undo:
        park(links, memory, undo)
        with detached(links):
            yield


def park(links: Sequence[HookLink], memory: DeviceMemory, undo: Undo) -> None:
    """Ask the processes to unmap their memory, until ``undo`` gives it back.

    They get back the blocks that ``memory`` has at that time, which may be on other GPUs by then.
    The hooks stay connected.
    """
    away: set[int] = set()
    undo.add(_unguard, links, memory, away)
    guarded = guard(memory)
    for link in links:
        # If it is stopped, it is not asked: it would park when it goes on, and be left alone then.
        stopped_state.await_going(link.pid)
        undo.add(_give_back, link, memory, away)
        _require_two_keepers(link.pid, memory, guarded)
        point(Point.PARKING_PARK)
        away.add(link.pid)
        link.park()


@contextlib.contextmanager
def detached(links: Sequence[HookLink]) -> Iterator[None]:
    """Ask the hooks to close their sockets inside, so that CRIU meets none; then reconnect."""
    with Undo() as undo:
        detach(links, undo)
        yield


def detach(links: Sequence[HookLink], undo: Undo) -> None:
    """Ask the hooks to close their sockets until they are reached again."""
    for link in links:
        undo.add(_connected, link)
        point(Point.PARKING_DETACH)
        link.detach()


def _connected(link: HookLink) -> None:
    """Connect, also if an answer was lost and it is unknown whether the hook detached."""
    if not link.connected:
        link.reattach()


def guard(memory: DeviceMemory) -> set[tuple[int, int]]:
    """Ask the movers to guard all blocks, so that they outlive this process: one message each.

    Returns which are guarded, by (pid, block id). Raises :class:`Internal` if a mover is dead:
    nothing may be parked while only phosd holds it.
    """
    blocks = memory.all()
    processes = {pid: procfs.process_id(pid) for pid in {exported.pid for exported in blocks}}
    rows: dict[int, list[tuple[ProcessId, int, int]]] = {}
    for exported in blocks:
        # Otherwise it has ended, and parks nothing.
        if (process := processes[exported.pid]) is not None:
            rows.setdefault(exported.gpu, []).append((process, exported.block.id, exported.key))
    movers = memory.movers()
    if nobody := rows.keys() - {mover.gpu for mover in movers}:
        raise Internal(f"no data mover has the memory on GPU {min(nobody)}", hint="try again")
    for mover in movers:
        mover.guard(rows.get(mover.gpu, ()))
    return {(process.pid, number) for row in rows.values() for process, number, _ in row}


def _require_two_keepers(pid: int, memory: DeviceMemory, guarded: set[tuple[int, int]]) -> None:
    """Raise :class:`Internal` before a process is parked whose memory phosd or a mover does not
    hold (invariant 2): with one keeper, it would be lost with that.
    """
    alone = memory.not_held(pid) | {
        held.id for held in memory.held(pid) if (pid, held.id) not in guarded
    }
    if alone and procfs.process_id(pid) is not None:  # one that has ended parks nothing
        raise Internal(
            f"process {pid} would be parked with one keeper of block {min(alone)} (invariant 2)",
            hint="it was not parked, and goes on; its hook or phosd has a defect",
        )


def _unguard(links: Sequence[HookLink], memory: DeviceMemory, away: set[int]) -> None:
    """Tell the movers to stop guarding the memory of processes that have it back.

    Processes in ``away`` still lack theirs, and may depend on the movers. The movers notice by
    themselves which processes have ended.
    """
    back = {link.pid for link in links} - away
    processes = [found for pid in back if (found := procfs.process_id(pid)) is not None]
    with Undo() as each:
        for mover in memory.movers() if processes else ():
            each.add(if_alive, mover, partial(mover.unguard, processes))


def _give_back(link: HookLink, memory: DeviceMemory, away: set[int]) -> None:
    """Give a process its memory back. Retries on failure, since the program is lost without it.

    A :class:`Timeout` is not retried: the hook was waited for already.
    """
    give_up = time.monotonic() + _AGAIN_SECONDS
    while True:
        try:
            _connected(link)
            if link.hello().state is HookState.PARKED:
                _hand_back(link, memory)
            away.discard(link.pid)
            return
        except Timeout:
            raise
        except PhosError:
            if procfs.process_id(link.pid) is None or time.monotonic() > give_up:
                raise
            time.sleep(_PAUSE)


def _hand_back(link: HookLink, memory: DeviceMemory) -> None:
    process = procfs.process_id(link.pid)
    blocks = memory.held(link.pid)
    ids = {block.key: block.id for block in blocks}

    def replace(allocations: Mapping[int, Allocation]) -> None:
        """Guard what takes the place of guarded memory."""
        ids.update({new.key: ids[key] for key, new in allocations.items()})
        (mover,) = {new.mover for new in allocations.values()}
        if process is not None:
            mover.guard([(process, ids[new.key], new.key) for new in allocations.values()])
        memory.replace(allocations)

    hand_back(link, blocks, memory.adopted.mover, replace)


def own_again(links: Sequence[HookLink], progress: Progress, deadline: float) -> None:
    """Copy imported blocks into memory that the processes own, inside a stop if there are any.

    The driver's restore does not bring imported memory back (hazard 7).
    """
    if imported := [link for link in links if link.has_imports()]:
        progress.phase("quiesce", stopped=True)
        with closed_gates(imported, progress, deadline):
            for link in imported:
                link.rehome()
