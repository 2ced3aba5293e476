"""Take the contexts of a hollow program off its GPUs, too, or bring them back alone."""

from contextlib import ExitStack

import msgspec

from phosd.engine.faults import Point, point
from phosd.engine.image.manifest import Manifest
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.reservation import Reservation
from phosd.engine.node.gpus import list_gpus
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import HOLLOW, Suspended
from phosd.engine.operations.admission import context_bytes, require_host_memory
from phosd.engine.operations.coming_back import (
    affected_by,
    back_from_driver,
    hooked,
    require_resumable,
    require_room,
    rest_reserved,
)
from phosd.engine.operations.giving_back import giving_back
from phosd.engine.operations.keepers import keepers
from phosd.engine.operations.pinned_shelf import keep_pinned
from phosd.engine.operations.restore.load import device_bytes
from phosd.engine.operations.standing_still import freeze, thawing
from phosd.engine.program import driver_checkpoint
from phosd.errors import Busy, InvalidOption, Reason, Unsupported


def sink(
    node: Node, hollow: Suspended, caller: int, progress: Progress, *, leave: bool
) -> Suspended:
    """Suspend a hollow program wholly: the driver saves what is left of it on its GPUs. ``leave``:
    movers end there, unless they have other work. If anything fails, the program stays hollow.
    """
    with node.claim(hollow.pids), thawing(node, hollow) as thaw:
        require_resumable(hollow, caller)
        require_host_memory(context_bytes() * len(hollow.processes))
        node.readied.drop(hollow)
        kept = keepers(node, hollow.gpus, progress)
        progress.check()
        progress.about_to_touch(affected_by(hollow, hollow.pids, {}))
        pids = sorted(hollow.pids)
        with Undo() as undo:
            progress.phase("control", stopped=True)
            thaw()  # threads of its processes do the driver's work
            point(Point.SUSPEND_CONTROL)
            reservation = Reservation(node.gpu_locks, kept, hollow.processes, progress)
            driver_checkpoint.stop(pids, reservation, undo)
            progress.phase("publish", stopped=True)
            point(Point.SUSPEND_PUBLISH)
            suspended = sunk(node, hollow)
            undo.add(node.suspended.write, hollow)
            node.suspended.write(suspended)
            undo.forget()
        with giving_back(progress) as last_first:
            if leave:
                last_first.add(node.movers.leave, hollow.device_bytes, pids)
            last_first.add(reservation.release)
        progress.finish()
        return suspended


def sunk(node: Node, hollow: Suspended) -> Suspended:
    """Return the entry of a program that was hollow, and of which the driver has the rest now."""
    form = node.suspend_store.format_for(hollow.where, with_pids=bool(hollow.known), hollow=False)
    return msgspec.structs.replace(hollow, hollow=False, format=form)


def rise(
    node: Node,
    suspended: Suspended,
    manifest: Manifest,
    gpu: str,
    progress: Progress,
    *,
    back: bool,
) -> dict[int, int]:
    """Let the driver bring back what it has of a program, which is hollow, and frozen, then.
    ``gpu``: where the caller wants it; ``back``: the driver has nothing of it. Returns the GPUs
    that the contexts are on, each with itself.
    """
    if gpu:
        raise InvalidOption(
            "a program cannot become hollow on another GPU",
            hint=f"`phos resume {suspended.pid} --gpu {gpu}`, then `phos suspend {suspended.pid} "
            "--hollow`",
        )
    if back:
        raise Busy(
            f"the contexts of process {suspended.pid} are on its GPUs already",
            hint=f"`phos resume {suspended.pid}` brings its memory back, too",
        )
    if manifest.mode == "driver":
        raise Unsupported(
            f"the driver has all of process {suspended.pid}, its memory included",
            hint=f"`phos resume {suspended.pid}`",
            reason=Reason.NOT_PARKABLE,
        )
    blocks = device_bytes(manifest, {})
    contexts = {gpu: size - blocks.get(gpu, 0) for gpu, size in suspended.device_bytes.items()}
    node.movers.begin(contexts)
    require_room(node, suspended, manifest, contexts, {})
    affected = affected_by(suspended, hooked(manifest), {})
    progress.about_to_touch(affected)
    with ExitStack() as job:
        job.enter_context(node.freezer.made(suspended.image, suspended.pids))
        release = job.enter_context(rest_reserved(node, suspended, contexts, {}))
        progress.check()
        progress.phase("control")
        point(Point.RESUME_CONTROL)
        with node.gpu_locks.locked(affected.gpus, progress):
            release()
            back_from_driver(node.stopped, suspended, {}, list_gpus())
        with Undo() as undo:
            undo.add(node.freezer.dissolve, suspended.image)
            freeze(node, suspended.image, suspended.roots)
            hollow = msgspec.structs.replace(suspended, hollow=True, format=HOLLOW)
            node.suspended.write(hollow)
            undo.forget()
    keep_pinned(node, hollow)
    progress.finish()
    return {gpu: gpu for gpu in suspended.gpus}
