"""Define the manifest, which describes everything of an image except the bytes."""

import msgspec

from phosd.engine.image.called import Called
from phosd.engine.image.cpu_manifest import CpuDetails

FORMAT = 1
"""Rises when a phosd that knows only the earlier ones would misread an image."""
MAX_MANIFEST = 256 << 20
"""Largest size of a manifest in bytes; one for 8 GPUs with 141 GB each takes about 50 MB."""
CHUNK = 2 << 20
"""Bytes of a chunk, the unit of hashing, deduplication and transfer."""


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU that the program saw. ``memory`` in bytes; ``chip`` as NVML names it.

    ``used``: whether it had memory or a context there, or perhaps, in an image that does not tell;
    ``needs``: the bytes that the driver restores there, in mode ``driver``.
    """

    ordinal: int
    uuid: str
    chip: str
    memory: int
    used: bool = True
    needs: int = 0


class HostGpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU of the machine that made the image."""

    uuid: str
    chip: str


class ChunkRef(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The place of one chunk's bytes. ``digest`` is 32 hex digits; ``offset`` is the record's."""

    digest: str
    pack: int
    offset: int
    length: int


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A physical allocation of one process (``process`` is an index into the manifest's list).

    If memory is shared, all blocks but the first have no chunks; their ``alias`` names the first
    one by process index and block id. ``va`` is 0 for memory that the program created but has not
    mapped. With ``host`` the memory is in the host's RAM, where the GPU reaches it.
    """

    process: int
    id: int
    va: int
    size: int
    gpu: int
    chunks: tuple[ChunkRef, ...] = ()
    alias: tuple[int, int] | None = None
    host: bool = False


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process of the image. ``start_time`` is field 22 of ``/proc/pid/stat``, in ticks.

    Ids are those that it has for itself. ``outer_pid``: by which phosd knew it, if that was another
    one.
    """

    pid: int
    tree: int
    start_time: int
    executable: str
    command: tuple[str, ...]
    uid: int
    gid: int
    groups: tuple[int, ...]
    threads: tuple[int, ...]
    gpu: bool
    hooked: bool
    parked: bool
    affinity: dict[int, tuple[int, ...]] = {}
    cgroup: str = ""
    environment_names: tuple[str, ...] = ()
    outer_pid: int = 0

    @property
    def known_as(self) -> int:
        """The pid by which phosd knew the process."""
        return self.outer_pid or self.pid


class FileDigest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file written by CRIU, with its path relative to its tree's folder.

    ``sha256`` is the SHA-256 of the SHA-256s of its 16 MiB pieces (``private_files.py``).
    """

    path: str
    size: int
    sha256: str


class Tree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process tree, dumped by one run of CRIU into ``folder`` (relative).

    With ``pid_namespace`` it was in one that phosd had made, and its ids are those of that.
    """

    root: int
    folder: str
    files: tuple[FileDigest, ...]
    details: CpuDetails | None = None
    pid_namespace: bool = False


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine that made the image, for the admission of a restore.

    ``gpus`` are all of its GPUs in the driver's order, which is to be told what replaces each; none
    in an older image. ``runtime_dir``: where the hooks of its programs are reached, for as long as
    these live; empty in an older image.
    """

    boot_id: str
    kernel: str
    criu: str
    driver: int
    cpu_flags: tuple[str, ...]
    gpus: tuple[HostGpu, ...] = ()
    runtime_dir: str = ""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, weakref=True):
    """An image. ``created`` is UTC in ISO 8601; ids sort by time."""

    id: str
    created: str
    mode: str
    owner: int
    host: Host
    gpus: tuple[Gpu, ...]
    trees: tuple[Tree, ...]
    processes: tuple[Process, ...]
    blocks: tuple[Block, ...]
    stop_seconds: float
    parent: str | None = None
    why: str = ""
    """The reason for ``mode``, if the engine chose it."""
    wrong_guesses: int = 0
    load_order: tuple[int, ...] = ()
    name: str = ""
    """The name of the program, if it has one."""
    number: int = 0
    """The number of the image among those of its owner with this name."""
    format: int = FORMAT
    phosd: str = ""
    """The version of phosd that made it; empty before this was noted."""
    origin: str = ""
    """The id that the image had where it was made, if it was imported."""
    within: str = ""
    """The pod, Slurm job or container that the program was in, in words; empty: none, or older."""

    ended: bool = False
    """Whether the program was ended with it, so that nothing else is left of it."""

    @property
    def called(self) -> Called:
        """What people call its program, and what that was in."""
        return Called(self.name, self.within)

    @property
    def root(self) -> Process | None:
        """The first process of the first tree."""
        return next((p for p in self.processes if p.pid == self.trees[0].root), None)

    @property
    def device_bytes(self) -> int:
        """Device memory that a restore needs, in bytes."""
        return sum(b.size for b in self.blocks if b.alias is None)

    @property
    def shares_memory(self) -> bool:
        """Whether several of its processes share device memory."""
        return any(block.alias is not None for block in self.blocks)

    @property
    def shares_or_exports_memory(self) -> bool:
        """Whether one of its processes has device memory that it may share with others later."""
        kept = (tree.details.device_memory for tree in self.trees if tree.details is not None)
        return self.shares_memory or any(kept)
