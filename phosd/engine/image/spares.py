"""Allocate packs for the next image in advance."""

import fcntl
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from phosd.engine.image import private_files
from phosd.engine.image.folder import StoreFolder
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.packs import CAPACITY, RECORD, pack_count
from phosd.engine.image.tier import Tier
from phosd.errors import OutOfSpace
from phosd.units import human_bytes

_THREADS = 8


class SparePacks:
    """Allocate the spare packs of a store; the next image's writer takes what it needs of them.

    A checkpoint into memory (tmpfs) is several times faster if the pages are allocated already.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder

    def preallocate(self, byte_count: int, tier: Tier | None = None) -> None:
        """Allocate spare packs for ``byte_count`` bytes of chunks in a tier, by default the disk.

        Raises :class:`OutOfSpace`.
        """
        tier = tier or self._folder.disk
        chunks = -(-byte_count // CHUNK)
        if not chunks:
            return
        size = _size(chunks)
        with self._folder.locked():
            kept = tier.spare_paths()
            large = [path for path in kept if path.stat().st_size >= size]
            missing = pack_count(chunks) - len(large)
            # Packs that stay pinned are better made larger than replaced.
            small = [path for path in kept if path not in large][-missing:] if missing > 0 else []
            anew = missing * size - sum(path.stat().st_size for path in small)
            free = tier.free_bytes()
        if missing <= 0:
            return
        if anew > free:
            raise OutOfSpace(
                f"{tier.path} has no room for {human_bytes(byte_count)} of device memory",
                hint="delete images (`phos rm`) or give the store a larger disk",
            )
        paths = [*small, *(tier.spare_path() for _ in range(missing - len(small)))]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(partial(self._make, size), paths))

    def drop(self) -> None:
        """Remove the spare packs that no image has taken, except in a tier that keeps them."""
        with self._folder.locked():
            for tier in self._folder.tiers:
                for path in () if tier.keeps_packs else tier.spare_paths():
                    path.unlink()

    def _make(self, size: int, path: Path) -> None:
        """Make a spare pack of ``size`` bytes, or make a smaller one that large."""
        with self._folder.locked():
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            with private_files.space_errors(str(path)):
                os.ftruncate(fd, size)  # before: huge pages are for what lies within the size
                os.posix_fallocate(fd, 0, size)
        except BaseException:
            path.unlink()
            raise
        finally:
            private_files.close_locked(fd)


def fitting(spares: Sequence[Path], chunk_count: int) -> list[Path]:
    """Return the spare packs for an image of so many chunks, of those given, the smallest first:
    those that are large enough first, so that a small image does not take large packs.
    """
    size = _size(chunk_count)
    large = [path for path in spares if path.stat().st_size >= size]
    return [*large, *(path for path in reversed(spares) if path not in large)]


def _size(chunks: int) -> int:
    """Return the bytes of each pack of an image of so many chunks."""
    count = pack_count(chunks)
    return min(CAPACITY, -(-chunks // count) * RECORD) if count else 0
