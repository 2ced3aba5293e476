"""Store the device memory of suspended programs: image stores in memory and on disk."""

import contextlib
import hashlib
import logging
import shutil
import threading
from pathlib import Path

from phosd.engine.image.private_files import space_errors
from phosd.engine.image.store import Store
from phosd.engine.image.tier import SUSPENDED
from phosd.engine.image.usage import pack_bytes, total_bytes
from phosd.engine.node import staging
from phosd.engine.node.suspended import (
    FORMAT,
    HOLLOW,
    IN_RUNTIME_DIR,
    WITH_PIDS,
    Register,
    Suspended,
)
from phosd.engine.system import memory_mount
from phosd.engine.system.freezer import Freezer
from phosd.engine.system.own_folders import is_own, own_folder
from phosd.errors import Busy, NoSuchImage

_log = logging.getLogger(__name__)


def _elsewhere(suspended: Suspended, where: str) -> NoSuchImage:
    pid = suspended.pid
    return NoSuchImage(
        f"what process {pid} had on its GPUs {where}",
        hint="set state_dir back to what it was when the program was suspended, restart phosd, and "
        f"`phos resume {pid}`; what is in memory is lost once it is unmounted",
    )


def _kept_bytes(shelf: Store, owner: int, but: str) -> int:
    """Return the bytes on a shelf for a user: what several programs have counts once, and what an
    image has, too, as the image's.
    """
    images = [image for image in shelf.list() if image.owner == owner and image.id != but]
    sizes: dict[int, int] = {}
    for image in images:
        for pack, size in pack_bytes(image).items():
            sizes[pack] = max(size, sizes.get(pack, 0))
    of_images = 0
    for number, size in sizes.items():
        with contextlib.suppress(FileNotFoundError):  # its program was resumed meanwhile
            of_images += size if shelf.disk.pack_path(number).stat().st_nlink > 1 else 0
    return total_bytes(images) - of_images


class SuspendStore:
    """Stores of suspended programs, listed in ``register``, with the digests of ``images``.

    ``memory_dir`` is a folder in memory; None for one in ``tier_dir``, beside the images in memory,
    which is mounted for it where it is not. Where it cannot be mounted there is one in
    ``/dev/shm``, named after ``runtime_dir``: earlier versions of phosd always had it there, and
    what they have suspended is found. Safe to use from several threads.
    """

    def __init__(
        self,
        images: Store,
        register: Register,
        runtime_dir: Path,
        memory_dir: Path | None,
        tier_dir: Path,
        freezer: Freezer,
    ) -> None:
        self._images = images
        self._register = register
        self._memory_dir = memory_dir
        self._tier_dir = tier_dir
        self._freezer = freezer
        name = hashlib.sha256(bytes(runtime_dir.resolve())).hexdigest()[:16]
        self._disk = images.state / "suspended" / name
        self._named = staging.MEMORY / f"phos-suspended-{name}"
        self._shelves: dict[Path, Store] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Free the memory, if no program is suspended."""
        with self._lock:
            for folder in self._in_memory:
                shelf = self._shelves.pop(folder, None)
                if shelf and not self._register.images():
                    shutil.rmtree(shelf.state)

    def shelf(self, where: str) -> Store:
        """Return the store for what is going to be suspended: in ``memory`` or on ``disk``.

        It uses the same digests as the images.
        """
        return self._store(self._new_in_memory() if where == "memory" else self._disk)

    def shelf_of(self, suspended: Suspended) -> Store:
        """Return the store that has the device memory of a suspended program. Raises
        :class:`NoSuchImage` if it is that of another state folder.
        """
        if suspended.where == "memory":
            for folder in self._in_memory:
                if is_own(folder) and self._store(folder).disk.has(suspended.image):
                    return self._ours(folder, suspended)
        shelf = self.shelf(suspended.where)
        if not shelf.disk.has(suspended.image):
            raise _elsewhere(suspended, f"is not in {shelf.state}")
        return shelf

    def _ours(self, folder: Path, suspended: Suspended) -> Store:
        """Return the store there. Raises :class:`NoSuchImage` if another state folder has the
        secret of its digests.
        """
        shelf = self._store(folder)
        if shelf.key.packed != self._images.key.packed:
            raise _elsewhere(suspended, f"is in {folder}, of another state folder")
        return shelf

    def format_for(self, where: str, *, with_pids: bool, hollow: bool) -> int:
        """Return the format of the file of a program that is being suspended."""
        if hollow:
            return HOLLOW
        if where == "memory" and self._new_in_memory() == self._in_tier:
            return IN_RUNTIME_DIR
        return WITH_PIDS if with_pids else FORMAT

    def taken(self, owner: int, but: str = "") -> int:
        """Return the bytes of a user's suspended programs, including those being suspended, without
        the one with the image ``but``.
        """
        there = {each.image: each for each in self._register.all() if each.image != but}
        with self._lock:
            making = {
                image: reserved
                for shelf in self._shelves.values()
                for image, reserved in dict(shelf.reservations).items()
                if image not in there
            }
        total = sum(reserved.size for reserved in making.values() if reserved.owner == owner)
        shelves: dict[Path, Store] = {}
        for each in there.values():
            if each.owner == owner:
                try:
                    shelf = self.shelf_of(each)
                except NoSuchImage:
                    total += each.stored_bytes
                else:
                    shelves[shelf.state] = shelf
        return total + sum(_kept_bytes(shelf, owner, but) for shelf in shelves.values())

    def forget_the_dead(self) -> None:
        """Remove the data of suspended programs that have ended, and what froze them."""
        for each in self._register.all():
            self._freezer.let_the_killed_end(each.pids)
            if not each.alive:
                self._freezer.remove_left({each.image}.__contains__)
                with contextlib.suppress(NoSuchImage, Busy):
                    self.shelf_of(each).delete(each.image)
                    _log.info("process %d ended while it was suspended", each.pid)
                self._register.remove(each)

    def sweep(self) -> None:
        """Remove data that belong to no suspended program. No job may run."""
        self.forget_the_dead()
        known = self._register.images()
        for folder in (*self._in_memory, self._disk):
            if is_own(folder):
                shelf = self._store(folder)
                for image in {image.id for image in shelf.list()} | shelf.damaged().keys():
                    if image not in known:
                        shelf.delete(image)
                shelf.sweep()

    @property
    def _in_tier(self) -> Path:
        return self._tier_dir / SUSPENDED

    @property
    def _in_memory(self) -> tuple[Path, ...]:
        """The folders in memory where suspended programs may be."""
        return (self._memory_dir,) if self._memory_dir else (self._in_tier, self._named)

    def _new_in_memory(self) -> Path:
        """Return the folder in memory for what is going to be suspended. Raises
        :class:`NotAuthorized` if there can be none.
        """
        if self._memory_dir:
            return self._memory_dir
        with self._lock:
            why = memory_mount.mount(self._tier_dir)
        if why:
            if self._named not in self._shelves:
                _log.warning(
                    "what is suspended is in %s, as %s cannot be mounted: %s",
                    *(self._named, self._tier_dir, why),
                )
            return own_folder(self._named)
        return self._in_tier

    def _store(self, folder: Path) -> Store:
        with self._lock:
            if folder not in self._shelves:
                with space_errors(f"{folder}, where suspended programs are kept,"):
                    self._shelves[folder] = Store(folder, like=self._images)
            return self._shelves[folder]
