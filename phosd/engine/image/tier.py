"""Define the tiers of an image store: folders for images and packs, on the disk or in memory."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.image import private_files
from phosd.engine.image.validate import valid_id
from phosd.engine.system.host_memory import available_memory

MANIFEST = "manifest.json"
SUSPENDED = "suspended"
"""The folder beside images in memory in which the memory of suspended programs is."""
_BLOCK = 512
"""Bytes of a block of ``stat``."""
_LEFT_TO_OTHERS = 1 / 16
"""The share of the available memory that images leave: the kernel's figure is an estimate."""


@dataclass(frozen=True)
class ExpectedSize:
    """The bytes that an image is going to take: CRIU's ``files``, and ``chunks``, which may become
    as many as ``most``.
    """

    files: int
    chunks: int
    most: int = 0

    @property
    def total(self) -> int:
        return self.files + self.chunks


class Tier:
    """A folder with images and packs, created (mode 0700) if it does not exist."""

    keeps_packs = False
    """Whether packs that nobody needs any more become spare packs, at their full length."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.images = path / "images"
        self.packs = path / "packs"
        for folder in (path, self.images, self.packs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            private_files.require_private(folder)

    @property
    def is_there(self) -> bool:
        """Whether the folder can be reached."""
        return self.images.exists()

    def pack_path(self, number: int) -> Path:
        """Return the path of pack ``number``, whether it exists or not."""
        return self.packs / f"{number}.pack"

    def pack_numbers(self) -> Sequence[int]:
        """Return the numbers of all existing packs."""
        names = (p.name.removesuffix(".pack") for p in self.packs.glob("*.pack"))
        return sorted(int(name) for name in names if name.isdecimal())

    def spare_paths(self) -> Sequence[Path]:
        """Return the spare packs that are complete, the smallest first.

        The caller holds the store's lock.
        """
        found = (path for path in self.packs.glob("*.spare") if private_files.unused(path))
        return sorted(found, key=lambda path: path.stat().st_size)

    def names(self) -> Sequence[str]:
        """Return the names of all folders of images, finished or not. Raises :class:`OSError`."""
        return [path.name for path in self.images.iterdir()]

    def has(self, image_id: str) -> bool:
        """Return whether an image is published here."""
        return (self.images / image_id / MANIFEST).exists()

    def published(self) -> Iterator[str]:
        """Return the ids of the images that are published here. Raises :class:`OSError`."""
        return (name for name in sorted(self.names()) if valid_id(name) and self.has(name))

    def free_bytes(self) -> int:
        """Return the free bytes of the file system."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def spare_bytes(self) -> int:
        """Return the bytes of the spare packs. The caller holds the store's lock."""
        return sum(path.stat().st_size for path in self.spare_paths())

    def remove_pack(self, number: int) -> None:
        """Remove a pack that no image names. No other job may have it open."""
        path = self.pack_path(number)
        if self.keeps_packs and path.stat().st_nlink == 1:  # what is another's, too, stays as it is
            path.rename(self.spare_path())
        else:
            path.unlink()

    def spare_path(self) -> Path:
        """Return a new path for a spare pack."""
        return self.packs / f"{secrets.token_hex(8)}.spare"

    def drop(self, image_id: str) -> None:
        """Remove the folder of an image: first its manifest, if it has one."""
        folder = self.images / image_id
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
        private_files.sync_folder(self.images)


class MemoryTier(Tier):
    """The tier in memory: a file system of its own, of which images take at most ``limit`` bytes.

    What is only here is lost with it: when the machine is started anew, or somebody unmounts it.
    Packs go from one image to the next, so that their memory is allocated once.
    """

    keeps_packs = True

    def __init__(self, path: Path, limit: int) -> None:
        super().__init__(path)
        self.limit = limit
        self._device = path.stat().st_dev

    @property
    def is_there(self) -> bool:
        """Whether the file system is still mounted."""
        return super().is_there and self.path.stat().st_dev == self._device

    @property
    def has_suspended(self) -> bool:
        """Whether what suspended programs had on their GPUs is beside the images."""
        return any((self.path / SUSPENDED / "images").glob("*/manifest.json"))

    def claim(self, key: bytes) -> bool:
        """Make this the tier of the store with this key. Returns whether it is no other's."""
        name = hashlib.sha256(key).hexdigest()
        path = self.path / "store"
        try:
            return private_files.read_private(path, len(name)) == name.encode()
        except FileNotFoundError:
            private_files.write_durably(path, name.encode())
            return True

    def taken_bytes(self) -> int:
        """Return the bytes that images take: all of the file system, but for suspended programs.
        What both have counts as the images'.
        """
        status = os.statvfs(self.path)
        others = (path.stat() for path in (self.path / SUSPENDED / "packs").glob("*"))
        alone = sum(each.st_blocks for each in others if each.st_nlink == 1)
        return (status.f_blocks - status.f_bfree) * status.f_frsize - alone * _BLOCK

    def has_room(self, files: int, chunks: int, others: int) -> bool:
        """Return whether there are so many bytes for CRIU's files, which are in memory twice for a
        moment, for chunks, which spare packs may take, and for what ``others`` are going to take.

        The caller holds the store's lock.
        """
        left = self._left_of(files, others)
        return left >= 0 and max(0, chunks - self.spare_bytes()) <= left

    def room(self, files: int, others: int) -> int:
        """Return the bytes for chunks, beside those (:meth:`has_room`). The caller holds the
        store's lock.
        """
        return self.spare_bytes() + max(0, self._left_of(files, others))

    def _left_of(self, files: int, others: int) -> int:
        """Return the bytes that are left beside those, without the spare packs."""
        of_host = int(available_memory() * (1 - _LEFT_TO_OTHERS))
        left = min(self.limit - self.taken_bytes(), self.free_bytes())
        return min(left - files, of_host - 2 * files) - others

    def drop_spare(self) -> bool:
        """Remove the smallest spare pack. Returns False if there is none."""
        for path in self.spare_paths()[:1]:
            path.unlink()
            return True
        return False
