"""Define paths and cached data of the bus objects.

Times are microseconds since the epoch (0: unknown), sizes bytes, durations seconds.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from phosd.bus import ROOT, path_of
from phosd.engine.image.manifest import Manifest
from phosd.engine.image.usage import file_bytes, pack_bytes
from phosd.engine.program.away import Away
from phosd.engine.program.process import GpuProcess
from phosd.service.jobs.job import Job
from phosd.service.jobs.sleeper import Sleeper

UNKNOWN = -1.0
"""Stands for null, which D-Bus lacks: a utilisation, temperature or power that is not reported."""


def job_path(job: Job) -> str:
    return f"{ROOT}/job/_{job.number}"


def process_path(process: GpuProcess) -> str:
    return f"{ROOT}/process/_{process.pid}_{process.start_time}"


def image_path(image: str) -> str:
    return path_of("image", image)


def pool_path(name: str) -> str:
    return path_of("pool", name)


def gpu_path(uuid: str) -> str:
    return path_of("gpu", uuid)


def microseconds(seconds: float | None) -> int:
    return int((seconds or 0.0) * 1e6)


@dataclass(frozen=True)
class ProcessView:
    """A GPU process, the id of its latest image, and its periodic checkpoints: one every ``every``
    seconds (0: none), of which the last ``keep`` are kept. ``sleeper``: how it is woken, if it is
    when somebody calls it. ``pool``: the one that its program is of, and perhaps ``waits`` in.
    """

    process: GpuProcess
    last_image: str
    gpus: tuple[str, ...]
    every: float
    keep: int
    sleeper: Sleeper | None = None
    pool: str = ""
    waits: bool = False


def suspended(views: Iterable[ProcessView]) -> dict[Away, list[ProcessView]]:
    """Return the suspended programs: where the memory of each is, and its processes."""
    found: dict[Away, list[ProcessView]] = {}
    for view in views:
        if view.process.away is not None:
            found.setdefault(view.process.away, []).append(view)
    return found


@dataclass(frozen=True)
class ImageView:
    """An image, when it was last verified, and whether it was intact.

    ``shared`` has a byte for each of its chunks, in the order of its blocks: 1 if an older image
    has it, too; or nothing if none has any. ``in_memory``: it is not on the disk yet. ``note``:
    what its owner has written of it. ``rehearsed``: when its restore was rehearsed
    last, and why it would have failed. ``crashes``: how often in a row its program has crashed soon
    after its restore.
    """

    manifest: Manifest
    verified: float = 0.0
    verified_ok: bool = False
    shared: bytes = b""
    in_memory: bool = False
    note: str = ""
    rehearsed: tuple[float, str] = (0.0, "")
    crashes: int = 0

    @property
    def state(self) -> str:
        return "in memory" if self.in_memory else "durable"

    @functools.cached_property
    def stored_bytes(self) -> int:
        """Bytes of the image on disk, without regard to other images."""
        return sum(pack_bytes(self.manifest).values()) + file_bytes(self.manifest)

    @functools.cached_property
    def shared_bytes(self) -> int:
        """Bytes of ``stored_bytes`` that an older image holds anyway."""
        chunks = (chunk for block in self.manifest.blocks for chunk in block.chunks)
        held = (chunk for chunk, shared in zip(chunks, self.shared, strict=False) if shared)
        return sum({(chunk.pack, chunk.offset): chunk.length for chunk in held}.values())

    @functools.cached_property
    def total_bytes(self) -> int:
        """Bytes that a restore loads: device memory and CRIU's files."""
        return self.manifest.device_bytes + file_bytes(self.manifest)


def created(manifest: Manifest) -> int:
    return microseconds(datetime.fromisoformat(manifest.created).timestamp())


def root_pid(manifest: Manifest) -> int:
    """Return the pid by which phosd knew the first tree's root process."""
    return manifest.root.known_as if manifest.root else manifest.trees[0].root


def root_command(manifest: Manifest) -> tuple[str, ...]:
    """Return the command line of the first tree's root process."""
    return manifest.root.command if manifest.root else ()


def output(manifest: Manifest) -> list[str]:
    """Return the files to which the first tree's root process wrote its standard output and
    error, each once.
    """
    tree = manifest.trees[0]
    files = () if tree.details is None else tree.details.open_files
    paths = (f.path for f in files if f.pid == tree.root and f.descriptor in (1, 2))
    return list(dict.fromkeys(paths))


def or_unknown(value: float | None) -> float:
    return UNKNOWN if value is None else value
