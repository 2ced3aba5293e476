"""Let a container's runtime save and restore a GPU program: phosd's part of its checkpoint.

The runtime runs CRIU, whose plugin (``phosd/runtime_plugin``) calls phosd before CRIU holds the
program. One that is to end is suspended (:func:`pause`); when CRIU holds it, its device memory is
saved (:func:`save`) beside CRIU's files. One that is to run on is saved as in any checkpoint
(:func:`checkpoint`), but for CRIU's part: its device memory is written when it runs again, before
CRIU says that it is done. At a restore CRIU makes the program as what it was, suspended: phosd
makes it its own again (:func:`adopt`), and resumes it.

Images of device memory are in the runtime's folder, so that they come and go with it.
"""

import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass

from phosd.engine.criu.dump.runtime_devices import RuntimeDevices, places
from phosd.engine.criu.dump.runtime_dump import RuntimeDump
from phosd.engine.criu.run.tree_resources import Place
from phosd.engine.faults import Point, point
from phosd.engine.image import foreign_folder
from phosd.engine.image.store import Store
from phosd.engine.image.usage import pack_bytes
from phosd.engine.job.checkpoint_history import CheckpointHistory
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import Suspended
from phosd.engine.operations.admission import context_bytes, require_host_memory
from phosd.engine.operations.checkpoint import CheckpointOptions
from phosd.engine.operations.checkpoint.attempt import Attempt
from phosd.engine.operations.checkpoint.checkpoint import MODES, require_alone_if_shared
from phosd.engine.operations.checkpoint.choose_mode import Choice, choose
from phosd.engine.operations.checkpoint.standing import Standing
from phosd.engine.operations.keepers import keepers
from phosd.engine.operations.move_checks import claimed, device_needs
from phosd.engine.operations.safe_points import SafePoints
from phosd.engine.operations.shelves import place_for
from phosd.engine.operations.suspend import (
    SuspendOptions,
    require_what_a_runtime_saves,
    suspend,
)
from phosd.engine.operations.suspended_records import manifest_of
from phosd.engine.program.discovery import discover_group
from phosd.engine.program.group import explain_death
from phosd.engine.program.process import is_gpu_process, uses_cuda
from phosd.engine.program.tree import scan
from phosd.engine.system import cgroups
from phosd.errors import Reason, Unsupported


def uses_gpus(pid: int) -> bool:
    """Return whether a process of the tree of ``pid`` uses a GPU."""
    pids = [each.pid for each in scan(pid).living if uses_cuda(each.pid)]
    with cgroups.thawed(pid) if pids else nullcontext():  # who is frozen does not tell the driver
        return any(map(is_gpu_process, pids))


@dataclass(frozen=True)
class Paused:
    """A program that is suspended while a runtime saves it, and where its processes had the GPU
    driver's devices before.
    """

    suspended: Suspended
    known: frozenset[Place]


def pause(node: Node, pid: int, progress: Progress) -> Paused:
    """Suspend the tree of ``pid`` for a checkpoint by a runtime. Raises what a suspension does, and
    :class:`Unsupported` for a program that phosd cannot park, or that has processes elsewhere.
    """
    known = places(scan(pid))
    options = SuspendOptions(by_runtime=True, leave=False)
    return Paused(suspend(node, pid, options, progress), known)


def save(node: Node, paused: Paused, folder: int, progress: Progress) -> RuntimeDevices:
    """Write the device memory of a paused program, which CRIU holds, into the runtime's open
    folder. Returns what is to be taken out of CRIU's files.

    Raises :class:`~phosd.errors.OutOfSpace`, and what :meth:`RuntimeDevices.of` does.
    """
    suspended = paused.suspended
    devices = RuntimeDevices.of(scan(suspended.pid), suspended.pids, paused.known)
    image_id = suspended.image
    foreign_folder.begin(folder, image_id, suspended.stored_bytes)
    _copy(node.suspend_store.shelf_of(suspended), image_id, folder, progress)
    progress.finish()
    return devices


def checkpoint(
    node: Node,
    pid: int,
    folder: int,
    dump: RuntimeDump,
    experience: CheckpointHistory,
    progress: Progress,
) -> Choice:
    """Save the tree of ``pid``, which a runtime's CRIU dumps meanwhile and lets run on, and write
    its device memory into the runtime's open ``folder``. Returns the mode.

    There is no second attempt, as CRIU makes none. Raises what a checkpoint does, and
    :class:`Unsupported` as :func:`pause`.
    """
    options = CheckpointOptions(experience=experience)
    progress.phase("prepare")
    with ExitStack() as job:
        check = claimed(node, job, options.caller)
        group = job.enter_context(discover_group(pid, node.config.runtime_dir, check))
        require_what_a_runtime_saves(group)
        require_alone_if_shared(group)
        choice = choose(group, options.mode, experience.past)
        size = sum(block.size for link in group.links for block in link.list_blocks())
        needs = device_needs(group, parks=True)
        contexts = context_bytes() * len(group.users)
        require_host_memory(contexts)
        shelf = node.suspend_store.shelf(place_for(node, "auto", size, contexts))
        writer = job.enter_context(shelf.begin(group.owner))
        writer.reserve(size)
        job.callback(shelf.spares.drop)
        shelf.spares.preallocate(size)
        kept = keepers(node, needs, progress)
        dump.on_hold(
            lambda: foreign_folder.begin(folder, writer.id, size), frozenset(group.gpu_pids)
        )
        progress.check()
        progress.about_to_touch(group.affected)
        job.enter_context(explain_death(group, "checkpoint"))
        attempt = Attempt(
            *(node, group, writer, dump, options, progress, kept),
            standing=Standing(node.stopped, progress),
            complete=lambda _: None,  # only of who does not run on
        )
        points = SafePoints(group, options, node.config.callback_deadline, progress)
        with points.reached():
            blocks = MODES[choice.mode](attempt)
        progress.phase("publish")
        dump.take_devices_out(folder)
        manifest = manifest_of(
            *(writer, group, dump.trees, needs, blocks), parked=True, own_ids=True
        )
        writer.publish(manifest)
        job.callback(shelf.delete, manifest.id)
        _copy(shelf, manifest.id, folder, progress)
    progress.finish()
    return choice


def _copy(shelf: Store, image_id: str, folder: int, progress: Progress) -> None:
    """Copy an image from a shelf into the runtime's folder, where its place is made."""

    def copied(size: int) -> None:
        progress.check()
        progress.advance(size)

    with shelf.open(image_id) as image:
        progress.phase("write", bytes_total=sum(pack_bytes(image.manifest).values()))
        point(Point.RUNTIME_WRITE)
        foreign_folder.save(image, folder, copied)


def adopt(node: Node, pid: int, folder: int, progress: Progress) -> Suspended | None:
    """Take the program that a runtime restores, the tree of ``pid``, for suspended, with the
    device memory that is in the runtime's open folder; None if none is.

    Raises :class:`ImageCorrupt`, also if another phosd made it, :class:`OutOfSpace`, and
    :class:`Unsupported` if it is of another program.
    """
    progress.phase("admission")
    image_id = foreign_folder.saved_in(folder)
    if not image_id:
        return None
    with foreign_folder.opened(folder, image_id, node.store) as image:
        tree = scan(pid)
        own = {each.own_pid: each for each in tree.living}
        gpu = [each.pid for each in image.manifest.processes if each.gpu]
        if missing := set(gpu) - own.keys():
            raise Unsupported(
                f"the container has no process {min(missing)}, whose device memory was saved",
                hint="restore the checkpoint that this memory was saved with",
                reason=Reason.PROCESS_STATE,
            )
        size = sum(pack_bytes(image.manifest).values())
        where = place_for(node, "auto", size, context_bytes() * len(gpu))
        progress.phase("copy", bytes_total=size)
        shelf = node.suspend_store.shelf(where)
        manifest = foreign_folder.bring(image, shelf, progress.advance)
    needs = {each.ordinal: 0 for each in manifest.gpus}
    for block in manifest.blocks:
        if block.alias is None and not block.host:
            needs[block.gpu] = needs.get(block.gpu, 0) + block.size
    suspended = Suspended(
        image=manifest.id,
        pid=pid,
        start_time=tree.root.start_time,
        owner=manifest.owner,
        command=tree.root.command,
        since=time.time(),
        where=where,
        stored_bytes=size,
        device_bytes={gpu: size + context_bytes() for gpu, size in needs.items()},
        processes=tuple(sorted(own[each].id for each in gpu)),
        format=node.suspend_store.format_for(where, with_pids=True, hollow=False),
        known={each: process.pid for each, process in own.items()},
    )
    node.suspended.write(suspended)
    progress.finish()
    return suspended
