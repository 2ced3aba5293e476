"""Take what a hollow program still has off its GPUs: its contexts."""

import msgspec

from phosd.engine.faults import Point, point
from phosd.engine.job.affected import AffectedProcess, AffectedSet
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.reservation import Reservation
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.admission import context_bytes, require_host_memory
from phosd.engine.operations.keepers import keepers
from phosd.engine.operations.resume import require_resumable
from phosd.engine.program import driver_checkpoint
from phosd.errors import PhosError


def hollow_program(node: Node, pid: int) -> Suspended | None:
    """Return the hollow program that has the process, if it is of one."""
    for each in node.suspended.living():
        if each.hollow and (pid == each.pid or pid in each.pids):
            return each
    return None


def sink(
    node: Node, hollow: Suspended, caller: int, progress: Progress, *, leave: bool
) -> Suspended:
    """Suspend a hollow program wholly: the driver saves what is left of it on its GPUs. ``leave``:
    movers end there, unless they have other work. If anything fails, the program stays hollow.
    """
    with node.claim(hollow.pids):
        require_resumable(hollow, caller)
        require_host_memory(context_bytes() * len(hollow.processes))
        kept = keepers(node, hollow.gpus, progress)
        progress.check()
        progress.about_to_touch(_affected(hollow))
        pids = sorted(hollow.pids)
        form = node.suspend_store.format_for(
            hollow.where, with_pids=bool(hollow.known), hollow=False
        )
        with Undo() as undo:
            progress.phase("control", stopped=True)
            point(Point.SUSPEND_CONTROL)
            reservation = Reservation(node.gpu_locks, kept, hollow.processes, progress)
            driver_checkpoint.stop(pids, reservation, undo)
            progress.phase("publish", stopped=True)
            point(Point.SUSPEND_PUBLISH)
            suspended = msgspec.structs.replace(hollow, hollow=False, format=form)
            undo.add(node.suspended.write, hollow)
            node.suspended.write(suspended)
            undo.forget()
        progress.phase("release", stopped=True)
        try:
            with Undo() as last_first:
                if leave:
                    last_first.add(node.movers.leave, hollow.device_bytes, pids)
                last_first.add(reservation.release)
                point(Point.SUSPEND_RELEASE)
        except (PhosError, OSError) as error:  # the program is suspended nevertheless
            progress.note(f"not all that the program had on its GPUs was given back: {error}")
        progress.finish()
        return suspended


def _affected(hollow: Suspended) -> AffectedSet:
    processes = (
        AffectedProcess(pid, start, gpu=True, hooked=True) for pid, start in hollow.processes
    )
    return AffectedSet(tuple(processes), hollow.gpus)
