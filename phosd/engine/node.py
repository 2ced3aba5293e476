"""This node: its folders, its image store, its data movers, and which processes have a job."""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from phosd.engine import outside, process
from phosd.engine.claims import Claims
from phosd.engine.criu import Criu
from phosd.engine.errors import Busy, Internal, NoSuchImage
from phosd.engine.holdings import Holdings
from phosd.engine.image.store import Store
from phosd.engine.mover import Mover
from phosd.engine.process import GpuProcess
from phosd.engine.progress import Progress
from phosd.engine.rlimit import allow_many_descriptors
from phosd.engine.room import Turns
from phosd.engine.suspended import Register
from phosd.engine.undo import Undo
from phosd.engine.unit import Identity, Unit

_MEMORY = Path("/dev/shm")
_STAGING = "phosd-"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeConfig:
    """Where things are, and how much may be used. Sizes in bytes, None for the engine's choice."""

    state_dir: Path = Path("/var/lib/phos")
    runtime_dir: Path = Path("/run/phos")
    staging_limit: int | None = None
    ring_bytes: int | None = None
    criu: Path | None = None
    shadow_limit: int | None = None
    """Device memory a GPU for copies of what is being saved."""
    snapshots: bool = True
    """Whether all of it may be copied inside the stop; else only what the program overwrites."""
    memory_dir: Path | None = None
    """A folder in memory for what suspended programs had on their GPUs; None for one of its own."""


class Node:
    """The engine's resources on this node. Safe to use from several threads."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        allow_many_descriptors()
        self.store = Store(config.state_dir)
        hooks = config.runtime_dir / "hook"
        hooks.mkdir(parents=True, exist_ok=True)
        hooks.chmod(0o1777)  # every user's programs put their sockets there
        self._movers: dict[int, Mover] = {}
        self._claims = Claims()
        self._listed: dict[int, GpuProcess] = {}
        self._kept: dict[Identity, Holdings] = {}
        self._shelves: dict[str, Store] = {}
        self.suspended = Register(config.runtime_dir)
        self.turns = Turns()
        """On which GPUs the driver takes a program off, or brings one back."""
        self._copying = Turns()
        self._lock = threading.Lock()
        self._criu: Criu | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of all memory and end the data movers."""
        self._close_kept(lambda _: True)
        with self._lock:
            for mover in self._movers.values():
                mover.close()
            self._movers.clear()
            if (shelf := self._shelves.pop("memory", None)) and not self.suspended.images():
                shutil.rmtree(shelf.state)

    @property
    def criu(self) -> Criu:
        """A CRIU that works here. Raises when there is none."""
        with self._lock:
            if self._criu is None:
                self._criu = Criu.find(self.config.criu, self.config.runtime_dir / outside.SOCKET)
            return self._criu

    def mover(self, gpu: int) -> Mover:
        """The data mover of a GPU, started at its first use and again when it has died."""
        with self._lock:
            mover = self._movers.get(gpu)
            if mover is None or not mover.alive:
                if mover is not None:
                    mover.close()
                mover = self._movers[gpu] = Mover.start(
                    gpu, self.config.ring_bytes, self.store.key, self.config.runtime_dir
                )
            return mover

    def turn_to_copy(
        self, gpus: Collection[int], progress: Progress
    ) -> AbstractContextManager[None]:
        """Inside, no other job copies between these GPUs and the host. To be had before the
        program stops, and before a turn of :attr:`turns`. Raises :class:`Cancelled`.
        """
        where = ", ".join(map(str, sorted(gpus)))
        waiting = f"the memory of another program on GPU {where} is copied first"
        return self._copying.turn(gpus, progress, waiting=waiting)

    def processes(self) -> list[GpuProcess]:
        """The GPU processes of the node; those that a job works on are not disturbed."""
        self._close_kept(lambda _: False)
        with self._lock:
            movers = {mover.pid for mover in self._movers.values()}
        found = process.list_processes(self.config.runtime_dir, self.asking, movers, self._listed)
        self._listed = {known.pid: known for known in found}
        where = {pid: each.where for each in self.suspended.living() for pid in each.pids}
        return [_suspended(each, where[each.pid]) if each.pid in where else each for each in found]

    def shelf(self, where: str) -> Store:
        """The store for what suspended programs had on their GPUs: in ``memory`` or on ``disk``.

        Its digests are those of the images.
        """
        with self._lock:
            if where not in self._shelves:
                self._shelves[where] = Store(self._shelf_folders[where], like=self.store)
            return self._shelves[where]

    def leave(self, gpus: Iterable[int], pids: Iterable[int]) -> None:
        """End the movers of GPUs that nothing is held on, unless a job works on others than
        ``pids``: then nothing of phosd is on these GPUs.
        """
        with self._lock:
            if not self._claims.only(pids):
                return
            needed = {mover.gpu for kept in self._kept.values() for mover in kept.movers()}
            for gpu in {*gpus} - needed:
                if mover := self._movers.pop(gpu, None):
                    mover.close()

    def forget_the_dead(self) -> None:
        """Remove what suspended programs had that have ended since."""
        for each in self.suspended.all():
            if not each.alive:
                with contextlib.suppress(NoSuchImage, Busy):
                    self.shelf(each.where).delete(each.image)
                    _log.info("process %d ended while it was suspended", each.pid)
                self.suspended.remove(each)

    def sweep_suspended(self) -> None:
        """Remove what nobody is suspended with. No job may run."""
        self.forget_the_dead()
        known = self.suspended.images()
        for where, folder in self._shelf_folders.items():
            if folder.is_dir():
                shelf = self.shelf(where)
                for image in {image.id for image in shelf.list()} | shelf.damaged().keys():
                    if image not in known:
                        shelf.delete(image)
                shelf.sweep()

    @property
    def _shelf_folders(self) -> dict[str, Path]:
        name = hashlib.sha256(bytes(self.config.runtime_dir.resolve())).hexdigest()[:16]
        memory = self.config.memory_dir or _MEMORY / f"phos-suspended-{name}"
        return {"memory": memory, "disk": self.store.state / "suspended" / name}

    def asking(self, pid: int) -> AbstractContextManager[bool]:
        """Whether a process may be asked inside: no job works on it."""
        return self._claims.asking(pid)

    def claim(self, pids: Iterable[int]) -> AbstractContextManager[None]:
        """No other job of this node works on these processes inside. Raises :class:`Busy`."""
        return self._claims.claim(pids)

    @contextlib.contextmanager
    def held(self, unit: Unit) -> Iterator[Holdings]:
        """What the engine holds of the unit's memory. Afterwards it is kept for the next job, if it
        is known what the processes free.
        """
        identity = unit.identity
        holdings = self._take_kept(unit) or Holdings(self, {m.pid: m.gpus for m in unit.members})
        with self.keeping(identity, holdings):
            holdings.revive()
            yield holdings

    @contextlib.contextmanager
    def keeping(self, identity: Identity, holdings: Holdings) -> Iterator[None]:
        """What a job has made of these processes' memory is kept afterwards for the next, as
        :meth:`held` keeps it.
        """
        with Undo() as undo:
            undo.add(self._keep, identity, holdings)
            yield

    def let_go(self, unit: Unit) -> None:
        """Keep nothing of these processes."""
        if holdings := self._take_kept(unit):
            holdings.close()

    def _keep(self, identity: Identity, holdings: Holdings) -> None:
        if not holdings.watched:
            holdings.close()
            return
        with self._lock:
            self._kept[identity] = holdings

    def _take_kept(self, unit: Unit) -> Holdings | None:
        """What is kept of just these processes. What is kept of some of them and of others is let
        go of: it belonged to a unit that is no more.
        """
        pids = set(unit.gpu_pids)
        with self._lock:
            same = self._kept.pop(unit.identity, None)
        self._close_kept(lambda identity: any(pid in pids for pid, _ in identity))
        return same

    def _close_kept(self, unwanted: Callable[[Identity], bool]) -> None:
        """Let go of what is kept of some processes, and of those that have ended."""
        with self._lock:
            keys = [key for key, kept in self._kept.items() if unwanted(key) or not kept.watched]
            others = [self._kept.pop(key) for key in keys]
        for holdings in others:
            holdings.close()

    @contextlib.contextmanager
    def staging(self, byte_count: int) -> Iterator[Path | None]:
        """A folder in memory for about ``byte_count`` bytes of CRIU's files, gone afterwards.

        None when that is more than may be kept in memory: then they go to the disk at once.
        """
        if byte_count > self._staging_bytes():
            yield None
            return
        folder, lock = _locked_folder()
        try:
            yield folder if _find_pages(folder, byte_count) else None
        finally:
            try:
                shutil.rmtree(folder)
            finally:
                os.close(lock)  # not before: another engine would take it for a leftover

    def sweep_staging(self) -> None:
        """Remove the folders that engines which were killed have left: nobody holds their lock.

        Everybody may write to the folder that they are in.
        """
        for folder in _MEMORY.glob(f"{_STAGING}*"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, BlockingIOError):
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(lock).st_uid == os.geteuid():
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(folder)
                finally:
                    os.close(lock)

    def _staging_bytes(self) -> int:
        """What may be in memory: the configured limit, and what is really free there."""
        try:
            status = os.statvfs(_MEMORY)
        except FileNotFoundError:
            return 0
        free = min(status.f_bavail * status.f_frsize, available_memory() // 2)
        limit = self.config.staging_limit
        return free if limit is None else min(limit, free)


def _suspended(found: GpuProcess, where: str) -> GpuProcess:
    place = "host memory" if where == "memory" else "a file on the disk"
    return replace(
        found,
        state="suspended",
        gpus=(),
        device_bytes=0,
        hook_state="hooked",
        reason=f"its device memory is in {place}",
    )


def _locked_folder() -> tuple[Path, int]:
    """A new folder in memory, and the descriptor whose lock says that somebody uses it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=_MEMORY))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)  # another engine took it for a leftover


def _find_pages(folder: Path, byte_count: int) -> bool:
    """Touch as much memory as will be needed, and free it again; false when it is not there.

    Also what :class:`PageStore` does not hold costs less in the stop then: the kernel gives out
    next what was freed last, and a page that a virtual machine's host has to find first costs
    several times one that was in use before.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, max(byte_count, 1))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            return False  # somebody else was quicker
        return True


def available_memory() -> int:
    """Host memory that can be had without swapping, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise Internal("/proc/meminfo has no MemAvailable", hint="phosd needs Linux 3.14 or newer")
