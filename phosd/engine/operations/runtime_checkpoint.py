"""Let a container's runtime save and restore a GPU program: phosd's part of its checkpoint.

The runtime runs CRIU, whose plugin (``phosd/runtime_plugin``) calls phosd: before CRIU holds the
program, to :func:`pause` it; when it does, to :func:`save` the device memory beside CRIU's files;
at the end the program, if it is still there, is resumed. At a restore CRIU makes the program as
what it was, suspended: phosd makes it its own again (:func:`adopt`), and resumes it.

Images of device memory are in the folder of the runtime's, so that they come and go with it.
"""

import time

from phosd.engine.image import foreign_folder
from phosd.engine.image.usage import pack_bytes
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import WITH_PIDS, Suspended
from phosd.engine.operations.admission import context_bytes
from phosd.engine.operations.suspend import SuspendOptions, place_for, suspend
from phosd.engine.program.process import is_gpu_process
from phosd.engine.program.tree import scan
from phosd.errors import Reason, Unsupported


def uses_gpus(pid: int) -> bool:
    """Return whether a process of the tree of ``pid`` uses a GPU."""
    return any(is_gpu_process(each.pid) for each in scan(pid).living)


def pause(node: Node, pid: int, progress: Progress) -> Suspended:
    """Suspend the tree of ``pid`` for a checkpoint by a runtime. Raises what a suspension does, and
    :class:`Unsupported` for a program that phosd cannot park, or that has processes elsewhere.
    """
    return suspend(node, pid, SuspendOptions(by_runtime=True, leave=False), progress)


def save(node: Node, suspended: Suspended, folder: int, progress: Progress) -> None:
    """Write the device memory of a paused program into an open folder of the runtime's.

    Raises :class:`~phosd.errors.OutOfSpace`.
    """
    shelf = node.suspend_store.shelf(suspended.where)
    with shelf.open(suspended.image) as image:
        progress.phase("save", bytes_total=sum(pack_bytes(image.manifest).values()))
        foreign_folder.save(image, folder, progress.advance)
    progress.finish()


def adopt(node: Node, pid: int, folder: int, progress: Progress) -> Suspended | None:
    """Take the program that a runtime restores, the tree of ``pid``, for suspended, with the device
    memory that is in an open folder of the runtime's; None if none is.

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
        format=WITH_PIDS,
        known={each: process.pid for each, process in own.items()},
    )
    node.suspended.write(suspended)
    progress.finish()
    return suspended
