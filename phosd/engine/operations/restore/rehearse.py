"""Rehearse the restore of an image: all of it, up to the first instruction of the program.

Nothing of it runs, and nothing stays: device memory is loaded, hashed on its GPU and freed, and
CRIU makes the processes in namespaces of their own, where they are killed
(:mod:`phosd.engine.criu.restore.rehearsal`). The program that was saved may run meanwhile.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import msgspec

from phosd.engine.criu.files.file_worker import Policy
from phosd.engine.criu.restore import admission
from phosd.engine.criu.restore import restore as criu_restore
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.criu.restore.rehearsal import Rehearsal
from phosd.engine.criu.restore.saved_tree import SavedTree, saved_trees
from phosd.engine.criu.restore.tree_files import TreeFiles
from phosd.engine.faults import Point, point
from phosd.engine.image.store import Image
from phosd.engine.image.verify import verify_chunks
from phosd.engine.job.affected import AffectedSet, now
from phosd.engine.job.checks import Check, require_all
from phosd.engine.job.progress import Progress
from phosd.engine.node.machine import same_machine
from phosd.engine.node.node import Node
from phosd.engine.operations.admission import require_device_memory, require_room_for_processes
from phosd.engine.operations.restore.image_gpus import place
from phosd.engine.operations.restore.load import device_bytes, loaded
from phosd.engine.operations.restore.options import Files
from phosd.errors import Internal, OutOfMemory
from phosd.units import counted, human_bytes


class RehearseOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a rehearsal: ``files`` as of a restore."""

    files: Files = "rollback"


def rehearse(node: Node, image_id: str, options: RehearseOptions, progress: Progress) -> None:
    """Rehearse the restore of image ``image_id``. The progress's notes say what was proved.

    Raises what :func:`~phosd.engine.operations.restore.restore.restore` raises where it would fail,
    but for ids, addresses and files that only the living original has.
    """
    progress.phase("admission")
    with ExitStack() as job:
        image = job.enter_context(node.store.open(image_id))
        manifest = image.manifest
        trees = saved_trees(manifest, node.store.image_folder(image_id))
        files = [job.enter_context(TreeFiles(tree, Policy(options.files))) for tree in trees]
        require_all(_checks(node, image, trees, files, progress))
        gpus = sorted({block.gpu for block in manifest.blocks})
        progress.about_to_touch(AffectedSet((), tuple(gpus), image_id, now()))

        progress.phase("load", bytes_total=manifest.device_bytes)
        point(Point.REHEARSE_LOAD)
        _load(node, image, progress)

        progress.phase("files", bytes_total=sum(f.size for t in manifest.trees for f in t.files))
        for tree in trees:
            tree.check_bytes()
            progress.advance(sum(file.size for file in tree.record.files))
            progress.check()

        progress.phase("cpu")
        point(Point.REHEARSE_CPU)
        for tree in trees:
            scratch = job.enter_context(node.staging.folder(0))
            if scratch is None:
                raise Internal("there is no /dev/shm", hint="mount a tmpfs there")
            as_is = Policy(options.files) is Policy.AS_IS
            rehearsal = Rehearsal(tree, scratch, as_is=as_is)
            rehearsal.require_possible()
            criu_restore.rehearse_tree(node.criu, rehearsal, image_id, progress)
        progress.note(
            f"{counted(len(manifest.processes), 'process', 'processes')} began, and ended before "
            "anything of the program ran"
        )
        progress.note("not rehearsed: the driver's restore of contexts" + _connections(trees))
        progress.finish()


def _checks(
    node: Node,
    image: Image,
    trees: list[SavedTree],
    files: list[TreeFiles],
    progress: Progress,
) -> Iterator[Check]:
    yield from same_machine(image.manifest, node.criu, node.config.runtime_dir)
    yield "host memory", partial(require_room_for_processes, image.manifest)
    for tree, of_tree in zip(trees, files, strict=True):
        options = TreeRestoreOptions(pid_namespace=True)
        yield from admission.admission_checks(node.criu, tree, options, of_tree)
        yield "files", partial(of_tree.require_as_saved, progress, replaced=False)


def _load(node: Node, image: Image, progress: Progress) -> None:
    """Load the device memory, hash it on its GPU, and free it; where there is no room for it beside
    others, as beside the original, compare its chunks with their digests on the CPU.
    """
    try:
        placement = place(node, image.manifest, "")
        require_device_memory(node, device_bytes(image.manifest, placement.moves))
        with loaded(node, image, progress, placement.moves):
            pass
    except OutOfMemory as error:
        progress.note(f"the device memory was read and hashed on the CPU only: {error.what}")
        verify_chunks(node.store, image, progress)
        return
    size = image.manifest.device_bytes
    if size:  # in mode driver it is in CRIU's files
        progress.note(f"{human_bytes(size)} of device memory were loaded, and hashed on the GPU")


def _connections(trees: list[SavedTree]) -> str:
    there = any(tree.details.connections for tree in trees)
    return ", and TCP connections within the program" if there else ""
