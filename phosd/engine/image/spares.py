"""Allocate packs for the next image in advance."""

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from phosd.engine.image import private_files
from phosd.engine.image.folder import StoreFolder
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.packs import CAPACITY, RECORD, pack_count
from phosd.engine.image.tier import Tier
from phosd.errors import OutOfSpace

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
        count = pack_count(chunks)
        if not count:
            return
        size = min(CAPACITY, -(-chunks // count) * RECORD)
        with self._folder.locked():
            for path in tier.spare_paths():
                if path.stat().st_size < size:
                    path.unlink()
            missing = count - len(tier.spare_paths())
            free = tier.free_bytes()
        if missing <= 0:
            return
        if missing * size > free:
            raise OutOfSpace(
                f"{tier.path} has no room for {byte_count} bytes of device memory",
                hint="delete images (`phos rm`) or give the store a larger disk",
            )
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(partial(self._make, tier), [size] * missing))

    def drop(self) -> None:
        """Remove the spare packs that no image has taken, except in a tier that keeps them."""
        with self._folder.locked():
            for tier in self._folder.tiers:
                for path in () if tier.keeps_packs else tier.spare_paths():
                    path.unlink()

    def _make(self, tier: Tier, size: int) -> None:
        path = tier.spare_path()
        with self._folder.locked():
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
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
