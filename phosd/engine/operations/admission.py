"""Check for room before an operation touches anything: disk, host memory, device memory."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from phosd.engine.criu.dump import written_files
from phosd.engine.criu.dump.declared_files import DeclaredFiles
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.manifest import CHUNK, Manifest
from phosd.engine.image.tier import ExpectedSize
from phosd.engine.memory import reservation
from phosd.engine.node.gpus import GpuInfo, list_gpus, used_by
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.program.group import CheckpointGroup
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system import cuda, procfs
from phosd.engine.system.host_memory import available_memory
from phosd.errors import OutOfMemory, OutOfSpace
from phosd.units import human_bytes

_CONTEXT = 640 << 20
"""Bytes of one CUDA context (370-640 MB on an H200)."""

_MOVER = 2 << 30
"""Device memory that a mover may take for itself; with the default ring it is half of that."""
_SPARE = 64 << 20


@dataclass(frozen=True)
class SizeOrShare:
    """The larger of ``size`` bytes and a ``share`` (0..1) of a disk or of memory."""

    size: int = 0
    share: float = 0.0

    def of(self, total: int) -> int:
        """Return the bytes, of ``total`` bytes."""
        return max(self.size, int(self.share * total))

    def __str__(self) -> str:
        return f"{self.share * 100:g}%" if self.share else human_bytes(self.size)


@dataclass(frozen=True)
class DiskLimits:
    """Space to keep free on the images' disk, and users' quotas in bytes (None: unlimited)."""

    kept_free: SizeOrShare = SizeOrShare()
    quota: Callable[[int], int | None] = lambda user: None


UNLIMITED = DiskLimits()


@dataclass(frozen=True)
class Needs:
    """Estimates in bytes: ``host`` memory during the stop, CRIU's files, the GPU's chunks.

    ``gpu`` counts equal chunks once, as far as that is known; ``most`` is all of them. ``room``: of
    the disk for chunks, if not all of them fit; None if they do.
    """

    host: int
    cpu: int
    gpu: int
    most: int = 0
    room: int | None = None

    @property
    def fits(self) -> bool:
        """Whether the disk has room for what is expected, whatever other images have of it."""
        return self.room is None or self.gpu <= self.room

    @property
    def image(self) -> ExpectedSize:
        """The size of the image."""
        return ExpectedSize(self.cpu + _SPARE, self.gpu, self.most)


def check_space(
    node: Node,
    group: CheckpointGroup,
    mode: str,
    limits: DiskLimits = UNLIMITED,
    to_store: int | None = None,
) -> Needs:
    """Estimate what a checkpoint needs. ``to_store``: how many bytes of device memory are expected
    to be stored (:func:`bytes_to_store`); None for all.

    Raises :class:`OutOfSpace` or :class:`OutOfMemory` if the disk or host memory does not suffice.
    Where not everything fits, it may be that enough of it is equal, or in other images of the
    owner. How much is known in the stop (:meth:`ImageWriter.claim`).
    """
    needs = _estimate(group, mode, node.config)
    needs = replace(needs, most=needs.gpu)
    if to_store is not None:
        needs = replace(needs, gpu=min(to_store, needs.gpu))
    room = _room(node, limits) - needs.image.files
    least = needs.gpu
    if needs.gpu > room:
        least = max(0, needs.gpu - node.store.shareable_bytes(group.owner))
    if needs.most > room:
        needs = replace(needs, room=room)
    require_room(node, replace(needs.image, chunks=least), limits)
    require_host_memory(needs.host)
    return needs


def bytes_to_store(node: Node, group: CheckpointGroup) -> int:
    """Estimate how many bytes of the group's device memory an image has to store, which may be much
    less than it has: of equal chunks, one is stored. The processes may run.
    """
    with node.kept_memory.of(group) as memory:
        return memory.chunks_to_store(group.links).total() * CHUNK


def _room(node: Node, limits: DiskLimits) -> int:
    """Return the bytes that the disk has for images."""
    free = node.store.free_bytes() - node.store.write_back.pending_bytes()
    return free - limits.kept_free.of(node.store.disk_bytes())


def require_room(node: Node, image: ExpectedSize, limits: DiskLimits = UNLIMITED) -> None:
    """Raise :class:`OutOfSpace` unless the disk has room for an image."""
    room = _room(node, limits)
    if image.total > room:
        kept = limits.kept_free.of(node.store.disk_bytes())
        least = f", of which {human_bytes(kept)} stay free (min_free)" if kept else ""
        raise OutOfSpace(
            f"the image needs about {human_bytes(image.total)}, {node.store.state} has"
            f" {human_bytes(room + kept)} free{least}",
            hint="delete images (`phos rm`), or put state_dir on a larger disk",
        )


def require_host_memory(wanted: int) -> None:
    """Raise :class:`OutOfMemory` unless the driver can save ``wanted`` bytes in host memory."""
    available = available_memory()
    if wanted > available:
        raise OutOfMemory(
            f"the driver needs about {human_bytes(wanted)} of host memory for the GPU state,"
            f" {human_bytes(available)} are available",
            hint="free host memory; under the hook (`phos run`) far less is needed",
        )


def context_bytes() -> int:
    """Return the size of one context in device memory, and in host memory when saved, in bytes."""
    return 0 if cuda.is_software() else _CONTEXT


def _estimate(group: CheckpointGroup, mode: str, config: NodeConfig) -> Needs:
    context = context_bytes()
    resident = sum(_private_bytes(p.pid) for tree in group.trees for p in tree.living)
    resident += sum(_file_bytes(tree, config) for tree in group.trees)
    contexts = context * len(group.users)
    blocks = sum(b.size for link in group.links for b in link.list_blocks())
    if mode != "driver":
        return Needs(host=contexts, cpu=resident + contexts, gpu=blocks)
    device = sum(max(sum(used_by(pid).values()), context) for pid in group.gpu_pids)
    device = max(device, blocks + contexts)
    return Needs(host=device, cpu=resident + device, gpu=0)


def _file_bytes(tree: ProcessTree, config: NodeConfig) -> int:
    """Return the bytes of the files of a program that an image holds. Raises :class:`Unsupported`
    if there are too many, and :class:`Timeout` if they cannot be looked at.
    """
    with DeclaredFiles(tree, config.kept_files, config.runtime_dir) as declared:
        return written_files.chosen(TreeResources.of(tree), declared.now()).byte_count


def _private_bytes(pid: int) -> int:
    """Return the anonymous and shared memory in bytes, which CRIU writes; 0 if it has ended."""
    try:
        text = (procfs.PROC / str(pid) / "status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    wanted = ("RssAnon:", "RssShmem:")
    lines = (line.split() for line in text.splitlines() if line.startswith(wanted))
    return sum(int(fields[1]) * 1024 for fields in lines)


def require_room_for_processes(manifest: Manifest) -> None:
    """Raise :class:`OutOfMemory` unless the host has room for another copy of what CRIU has saved,
    which would else be made at the cost of the program that runs.
    """
    wanted = sum(file.size for tree in manifest.trees for file in tree.files)
    free = available_memory()
    if wanted + _SPARE > free:
        raise OutOfMemory(
            f"the host has {human_bytes(free)} of memory available, the processes of the image "
            f"need {human_bytes(wanted)}",
            hint="end what uses it, or use a machine with more",
        )


def require_device_memory(
    node: Node, by_gpu: dict[int, int], what: str = "the image", *, give_way: bool = True
) -> None:
    """Raise :class:`OutOfMemory` unless each GPU has the bytes given in ``by_gpu`` free, beside
    what its mover takes. Only where that counts has the mover to be started to tell. Programs that
    are ready become hollow for it, one after the other, if that gives enough (``give_way``).
    """
    if not any(by_gpu.values()):
        return
    known = {gpu.ordinal: gpu for gpu in list_gpus() if gpu.memory_used is not None}
    for gpu, wanted in by_gpu.items():
        if gpu in known and wanted + _MOVER <= free_device_memory(node, known[gpu]):
            continue
        mover = node.movers.mover(gpu)
        free, _ = mover.free_memory()
        if wanted > free and give_way:
            node.readied.give_way(gpu, wanted - free)
            free, _ = mover.free_memory()
        if wanted > free:
            raise OutOfMemory(
                f"GPU {gpu} has {human_bytes(free)} free, {what} needs {human_bytes(wanted)}",
                hint="end or move what uses the GPU (`phos ps`)",
            )


def require_room_elsewhere(gpus: Collection[int]) -> None:
    """Raise :class:`OutOfMemory` unless each GPU but these has the room without which the driver
    brings no process back that knows it, whatever it uses (hazard 51).
    """
    for gpu in list_gpus():
        if gpu.ordinal not in gpus and gpu.memory_used is not None:
            reservation.require_room(gpu.ordinal, gpu.memory_total - gpu.memory_used)


def free_device_memory(node: Node, gpu: GpuInfo) -> int:
    """Return the bytes that a GPU has free. No mover is started to tell, which would take memory
    itself.
    """
    for mover in node.movers.running([gpu.ordinal]):
        if mover.alive:
            return mover.free_memory()[0]
    return gpu.memory_total - (gpu.memory_used or 0)
