"""Parking: processes let go of their device memory while the driver and CRIU save the rest."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from functools import partial

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.gate import closed_gates
from phosd.engine.hook_client.link import HookLink, HookState
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.device_memory import DeviceMemory
from phosd.engine.memory.exported import if_alive
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import PhosError, Timeout

_AGAIN_SECONDS = 5.0
"""For how long memory is offered to a program whose hook fails to take it."""
_PAUSE = 0.05


@contextlib.contextmanager
def parked(links: Sequence[HookLink], memory: DeviceMemory) -> Iterator[None]:
    """Inside, the processes hold none of their memory and their hooks are detached.

    After it every process has its memory at the same addresses again. The hooks must be awake by
    then, that is, the processes running. The movers guard the memory from before to after that.
    """
    with Undo() as undo:
        park(links, memory, undo)
        with detached(links):
            yield


def park(links: Sequence[HookLink], memory: DeviceMemory, undo: Undo) -> None:
    """The processes let go of their memory, until ``undo`` gives it back: what ``memory`` has
    for them then, which may be elsewhere by that time. The hooks stay connected.
    """
    away: set[int] = set()
    undo.add(_unguard, links, memory, away)
    guard(memory)
    for link in links:
        undo.add(_give_back, link, memory, away)
        point(Point.PARKING_PARK)
        away.add(link.pid)
        link.park()


@contextlib.contextmanager
def detached(links: Sequence[HookLink]) -> Iterator[None]:
    """Inside, the hooks hold no socket, so that CRIU meets none; after it they are connected."""
    with Undo() as undo:
        for link in links:
            undo.add(_connected, link)
            point(Point.PARKING_DETACH)
            link.detach()
        yield


def _connected(link: HookLink) -> None:
    """Also where only the answer to a request was lost, so that nobody knows if it was done."""
    if not link.connected:
        link.reattach()


def guard(memory: DeviceMemory) -> None:
    """Have the movers keep everything for its processes, should this engine end: one message each.

    Raises :class:`Internal` when a mover is dead: nothing may be parked with one keeper only.
    """
    blocks = memory.all()
    processes = {pid: procfs.process_id(pid) for pid in {exported.pid for exported in blocks}}
    rows: dict[int, list[tuple[ProcessId, int, int]]] = {}
    for exported in blocks:
        if (process := processes[exported.pid]) is not None:  # else it has ended, and parks nothing
            rows.setdefault(exported.gpu, []).append((process, exported.block.id, exported.key))
    for mover in memory.movers():
        mover.guard(rows.get(mover.gpu, ()))


def _unguard(links: Sequence[HookLink], memory: DeviceMemory, away: set[int]) -> None:
    """The processes have their memory again, but for those that are still ``away`` from it: of
    these nobody else may have it. One that has ended the movers see themselves.
    """
    back = {link.pid for link in links} - away
    processes = [found for pid in back if (found := procfs.process_id(pid)) is not None]
    with Undo() as each:
        for mover in memory.movers() if processes else ():
            each.add(if_alive, mover, partial(mover.unguard, processes))


def _give_back(link: HookLink, memory: DeviceMemory, away: set[int]) -> None:
    """Again, if it fails: without its memory a program is lost. One that does not answer has been
    waited for already.
    """
    give_up = time.monotonic() + _AGAIN_SECONDS
    while True:
        try:
            _connected(link)
            if link.hello().state is HookState.PARKED:
                link.unpark((h.block.id, h.descriptor) for h in memory.of(link.pid))
            away.discard(link.pid)
            return
        except Timeout:
            raise
        except PhosError:
            if procfs.process_id(link.pid) is None or time.monotonic() > give_up:
                raise
            time.sleep(_PAUSE)


def own_again(links: Sequence[HookLink], progress: Progress, deadline: float) -> None:
    """The processes own all of their memory, in a stop of its own if they do not: the driver does
    not bring imported memory back (hazard 7).
    """
    if imported := [link for link in links if link.has_imports()]:
        progress.phase("quiesce", stopped=True)
        with closed_gates(imported, progress, deadline):
            for link in imported:
                link.rehome()
