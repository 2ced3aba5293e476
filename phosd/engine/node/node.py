"""Hold the engine's resources on this node: folders, stores, data movers, claims."""

import logging
import os
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from phosd.engine.criu.run.program import Criu
from phosd.engine.hook_client import places
from phosd.engine.image.store import Store
from phosd.engine.image.tier import MemoryTier
from phosd.engine.memory.reservation import GpuLocks
from phosd.engine.node.claims import Claims
from phosd.engine.node.expected_memory import ExpectedMemory
from phosd.engine.node.kept_memory import KeptMemory
from phosd.engine.node.movers import Movers
from phosd.engine.node.readied import ReadiedMemory
from phosd.engine.node.staging import Staging
from phosd.engine.node.suspend_store import SuspendStore
from phosd.engine.node.suspended import Register, Suspended
from phosd.engine.program import process
from phosd.engine.program.away import Away
from phosd.engine.program.declared import KeptFiles
from phosd.engine.program.process import GpuProcess
from phosd.engine.program.stopped import StoppedProcesses
from phosd.engine.system import freezer, memory_mount, unsandboxed
from phosd.engine.system.freezer import Freezer
from phosd.engine.system.restarters import Restarters
from phosd.engine.system.rlimit import allow_many_descriptors
from phosd.units import human_bytes

_WORTH_TELLING = 1 << 20
"""Bytes of host memory: an empty file system takes some, too."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeConfig:
    """Configuration of a node: folders and limits. Sizes in bytes; None for the engine's choice."""

    state_dir: Path = Path("/var/lib/phos")
    runtime_dir: Path = Path("/run/phos")
    staging_limit: int | None = None
    ring_bytes: int | None = None
    criu: Path | None = None
    shadow_limit: int | None = None
    """Device memory per GPU for copies of what is being saved."""
    snapshots: bool = True
    """Whether to copy all memory inside the stop if it fits; if not, only overwritten chunks."""
    memory_dir: Path | None = None
    """A folder in memory for suspended programs' device memory; None for one of the node's own."""
    callback_deadline: float = 60.0
    """Seconds that a program has to come to a safe point, if a request does not say."""
    allow_unsafe_driver: bool = False
    """Whether to use a driver whose checkpoint is known to end programs."""
    memory_tier: int = 0
    """Host memory for images, which are written to the disk afterwards; 0: to the disk at once."""
    kept_files: KeptFiles = ()
    """Files that are saved with the programs of users, open or not."""
    freezers: tuple[str, ...] = freezer.KINDS
    """Which freezers of the kernel may freeze hollow programs, the first that can be had."""

    @property
    def memory_tier_dir(self) -> Path:
        """Where a file system for the memory tier is mounted."""
        return self.runtime_dir / "memory"


class Node:
    """The engine's resources on this node. Safe to use from several threads."""

    def __init__(self, config: NodeConfig) -> None:
        """Take the folders of a configuration, which no other node may use meanwhile."""
        self.config = config
        allow_many_descriptors()
        self.store = Store(config.state_dir, memory=_memory_tier(config))
        places.make_hooks_folder(config.runtime_dir)
        self._claims = Claims()
        self._listed: dict[int, GpuProcess] = {}
        self._restarters = Restarters()
        self.suspended = Register(config.runtime_dir)
        self.stopped = StoppedProcesses(config.runtime_dir)
        self.freezer = Freezer(config.runtime_dir, config.freezers)
        self.suspend_store = SuspendStore(
            self.store,
            self.suspended,
            config.runtime_dir,
            config.memory_dir,
            config.memory_tier_dir,
            self.freezer,
        )
        self.staging = Staging(config.staging_limit)
        self.movers = Movers(
            config.runtime_dir,
            config.ring_bytes,
            self.store.key,
            self._claims,
            lambda: self.kept_memory.gpus() | self.suspended.hollow_gpus(),
        )
        self.kept_memory = KeptMemory(self.movers)
        self.readied = ReadiedMemory()
        self.gpu_locks = GpuLocks()
        """Held while the driver takes a program off a GPU or brings it back."""
        self.expected_memory = ExpectedMemory()
        self._lock = threading.Lock()
        self._criu: Criu | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all memory and end the data movers."""
        self.kept_memory.close()
        self.readied.close()
        self.movers.close()
        self.suspend_store.close()
        needed = self.store.write_back.pending() or self.suspended.images()
        if self.config.memory_tier_dir.is_mount() and not needed:
            kept = _used_bytes(self.config.memory_tier_dir)
            why = memory_mount.unmount(self.config.memory_tier_dir)
            if why and kept >= _WORTH_TELLING:  # systemd's sandbox
                _log.info(
                    "%s of images, which are on the disk, too, stay in memory for the next phosd,"
                    " as %s cannot be unmounted (%s)",
                    human_bytes(kept),
                    self.config.memory_tier_dir,
                    why,
                )

    @property
    def criu(self) -> Criu:
        """A CRIU that works here. Raises if there is none."""
        with self._lock:
            if self._criu is None:
                runtime = self.config.runtime_dir
                self._criu = Criu.find(self.config.criu, runtime / unsandboxed.SOCKET, runtime)
            return self._criu

    def processes(self) -> list[GpuProcess]:
        """Return the GPU processes of the node. Processes under a job are not queried."""
        self.kept_memory.let_go_of_the_dead()
        self.readied.let_go_of_the_dead()
        self.stopped.forget_the_dead()
        if places.has_many_users(self.config.runtime_dir):
            places.forget_users(self.config.runtime_dir)
        movers = self.movers.pids()
        found = process.list_processes(
            self.config.runtime_dir, self.asking, self._restarters, movers, self._listed
        )
        self._listed = {known.pid: known for known in found}
        away = {pid: each for each in self.suspended.living() for pid in each.pids}
        return [
            _suspended(each, program, self.readied.bytes_of(program, each.pid))
            if (program := away.get(each.pid))
            else each
            for each in found
        ]

    def asking(self, pid: int) -> AbstractContextManager[bool]:
        """Register a query of a process inside the context; yields False if a job works on it."""
        return self._claims.asking(pid)

    def claim(self, pids: Iterable[int]) -> AbstractContextManager[None]:
        """Keep other jobs and queries away from these processes. Raises :class:`Busy`."""
        return self._claims.claim(pids)


def _used_bytes(place: Path) -> int:
    """Return the bytes that a file system takes."""
    status = os.statvfs(place)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _memory_tier(config: NodeConfig) -> MemoryTier | None:
    """Mount and return the tier in memory, if there is to be one and it can be mounted.

    One that is still mounted from before is used without room for more: what is there only is
    written to the disk.
    """
    folder = config.memory_tier_dir
    if not config.memory_tier:
        return MemoryTier(folder, 0) if folder.is_mount() else None
    if why := memory_mount.mount(folder):
        _log.warning("images go to the disk at once, as %s cannot be mounted: %s", folder, why)
        return None
    return MemoryTier(folder, config.memory_tier)


def _suspended(found: GpuProcess, program: Suspended, ready: int | None) -> GpuProcess:
    place = "host memory" if program.where == "memory" else "a file on the disk"
    # In MiB, as nvidia-smi has the memory of a GPU.
    sizes = sorted(program.device_bytes.items())
    needed = [f"{size >> 20} MiB on GPU {gpu}" for gpu, size in sizes]
    needs = f"; to be resumed its program needs {' and '.join(needed)}" if needed else ""
    contexts = ", and its contexts stay on its GPUs (hollow)" if program.hollow else ""
    if ready is not None:
        contexts, needs = ", and on its GPUs already, as are its contexts (ready)", ""
    return replace(
        found,
        state="suspended",
        gpus=program.gpus if program.hollow else (),
        device_bytes=ready or 0,
        hook_state="hooked",
        reason=f"its device memory is in {place}{contexts}{needs}",
        away=Away(
            *(program.image, program.where, program.stored_bytes, program.since, program.hollow),
            ready=ready is not None,
        ),
    )
