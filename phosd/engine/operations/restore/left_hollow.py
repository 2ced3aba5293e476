"""Leave a restored program hollow: its contexts are on its GPUs, and its memory on a shelf."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import msgspec

from phosd.engine.faults import Point, point
from phosd.engine.hook_client.link import HookLink, HookState
from phosd.engine.image.brought import bring, lacking_bytes
from phosd.engine.image.manifest import Block, Manifest
from phosd.engine.image.quota import require_suspendable
from phosd.engine.image.store import Image, Store
from phosd.engine.image.usage import pack_bytes
from phosd.engine.image.writer import ImageWriter
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.node.node import Node
from phosd.engine.node.suspended import HOLLOW, Suspended
from phosd.engine.operations.admission import DiskLimits
from phosd.engine.operations.pinned_shelf import keep_pinned
from phosd.engine.operations.shelves import room_on, shelves, taken_by
from phosd.engine.operations.standing_still import freeze
from phosd.engine.operations.suspended_records import manifest_with
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Internal, OutOfSpace, Reason, Unsupported
from phosd.units import human_bytes


def require_may_be_hollow(manifest: Manifest) -> None:
    """Raise :class:`Unsupported` if the program of the image cannot be restored without its device
    memory.
    """
    if manifest.mode == "driver":
        raise Unsupported(
            f"the driver has all of the program of image {manifest.id}, its memory included",
            hint="restore it without `hollow`",
            reason=Reason.NOT_PARKABLE,
        )
    if any(tree.details is not None and tree.details.device_memory for tree in manifest.trees):
        raise Unsupported(
            f"the program of image {manifest.id} had device memory open to share it, which has to "
            "be there when its processes are made",
            hint="restore it without `hollow`, then `phos suspend --hollow`",
            reason=Reason.SHARED_MEMORY,
        )


@dataclass(frozen=True)
class Shelved:
    """The device memory of an image on a shelf, where ``writer`` has begun an image of it.

    ``moves`` and ``needs``: the GPUs that replace those of the image, and the bytes that the
    program is going to need there.
    """

    node: Node
    where: str
    writer: ImageWriter
    blocks: tuple[Block, ...]
    moves: Mapping[int, int]
    needs: dict[int, int]

    def belongs_to(self, ids: Mapping[int, int]) -> None:
        """Do nothing: the pids are in the manifest that :meth:`conclude` takes."""

    def descriptor_of(self, name: str) -> int:
        """Raise :class:`Internal`: nothing of it is device memory."""
        raise Internal(f"the device memory {name} is not loaded", hint="report this")

    def hand_back(self, link: HookLink) -> None:
        """Raise :class:`Internal` if a process, which is to get none, has device memory."""
        if link.hello().state is not HookState.PARKED:
            raise Internal(f"restored process {link.pid} has memory of its own", hint="report this")

    def conclude(self, manifest: Manifest, _: Sequence[HookLink], undo: Undo) -> None:
        """Take the program for suspended, whose processes are in the manifest as they are now."""
        point(Point.RESTORE_SHELVE)
        ids = {each.pid: _id_of(each.pid) for each in manifest.processes}
        ours = self._manifest(manifest, ids)
        self.writer.publish(ours)
        undo.add(self.node.suspend_store.shelf(self.where).delete, ours.id)
        root = next(each for each in manifest.processes if each.pid == manifest.trees[0].root)
        suspended = Suspended(
            image=ours.id,
            pid=root.pid,
            start_time=ids[root.pid].start_time,
            owner=manifest.owner,
            command=root.command,
            since=time.time(),
            where=self.where,
            stored_bytes=sum(pack_bytes(ours).values()),
            device_bytes=self.needs,
            processes=tuple(sorted(ids[each.pid] for each in manifest.processes if each.gpu)),
            format=HOLLOW,
            hollow=True,
        )
        undo.add(self.node.freezer.dissolve, ours.id)
        freeze(self.node, ours.id, [*suspended.roots, *ids.values()])
        undo.add(self.node.suspended.remove, suspended)
        self.node.suspended.write(suspended)
        point(Point.RESTORE_OPEN)
        keep_pinned(self.node, suspended)

    def _manifest(self, manifest: Manifest, ids: Mapping[int, ProcessId]) -> Manifest:
        """Return the manifest of the device memory alone."""
        replace = msgspec.structs.replace
        processes = (
            replace(each, start_time=ids[each.pid].start_time, parked=each.gpu)
            for each in manifest.processes
        )
        trees = (replace(tree, files=(), details=None) for tree in manifest.trees)
        blocks = (replace(each, gpu=self.moves[each.gpu]) for each in self.blocks)
        return manifest_with(self.writer, self.needs, trees, processes, blocks)


def _id_of(pid: int) -> ProcessId:
    found = procfs.process_id(pid)
    if found is None:
        raise Internal(
            f"process {pid} of the restored program has ended at once",
            hint="its own log may say why",
        )
    return found


@contextmanager
def shelved(
    node: Node,
    image: Image,
    moves: Mapping[int, int],
    needs: dict[int, int],
    limits: DiskLimits,
    progress: Progress,
) -> Iterator[Shelved]:
    """Bring the device memory of an image to a shelf: to host memory if it has room, else to the
    disk. Packs on the same file system take no bytes, nor does what another program of the owner
    has there. Raises :class:`OutOfSpace`.
    """

    def copied(size: int) -> None:
        progress.check()
        progress.advance(size)

    with ExitStack() as job:
        where, writer = _begun(node, image, limits, job)
        # Where none can be made for phosd itself, none could be in the end for the program.
        job.enter_context(node.freezer.made(writer.id, [os.getpid()]))
        blocks = bring(image, writer, copied, link=True)
        yield Shelved(node, where, writer, blocks, moves, needs)


def _begun(node: Node, image: Image, limits: DiskLimits, job: ExitStack) -> tuple[str, ImageWriter]:
    owner = image.manifest.owner
    for where, shelf in shelves(node, "auto"):
        with ExitStack() as unless_taken:
            writer = unless_taken.enter_context(shelf.begin(owner))
            lacking = 0 if _has_all(shelf, image) else lacking_bytes(image.manifest, writer)
            if lacking > room_on(shelf, where, 0):
                continue
            if lacking and (quota := limits.quota(owner)) is not None:
                require_suspendable(quota, owner, lacking, taken_by(node, owner))
            writer.reserve(lacking)
            job.push(unless_taken.pop_all())
            return where, writer
    size = human_bytes(image.manifest.device_bytes)
    raise OutOfSpace(
        f"there is no room for {size} of device memory in memory or on the disk",
        hint="free host memory, or delete images (`phos rm`)",
    )


def _has_all(shelf: Store, image: Image) -> bool:
    """Return whether all packs of the image are on the shelf's file system."""
    device = shelf.state.stat().st_dev
    return all(os.fstat(pack).st_dev == device for pack in image.packs.values())
