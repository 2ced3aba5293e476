"""Allocate packs for the next image in advance."""

import fcntl
import os
import secrets
from concurrent.futures import ThreadPoolExecutor

from phosd.engine.image import private_files
from phosd.engine.image.folder import StoreFolder
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.packs import CAPACITY, RECORD, pack_count
from phosd.errors import OutOfSpace

_THREADS = 8


class SparePacks:
    """Allocate the spare packs of a store; the next image's writer takes what it needs of them.

    A checkpoint into memory (tmpfs) is several times faster if the pages are allocated already.
    """

    def __init__(self, folder: StoreFolder) -> None:
        self._folder = folder

    def preallocate(self, byte_count: int) -> None:
        """Allocate spare packs for ``byte_count`` bytes of chunks. Raises :class:`OutOfSpace`."""
        chunks = -(-byte_count // CHUNK)
        count = pack_count(chunks)
        with self._folder.locked():
            missing = count - len(self._folder.spare_paths())
        if missing <= 0:
            return
        size = min(CAPACITY, -(-chunks // count) * RECORD)
        if missing * size > self._folder.free_bytes():
            raise OutOfSpace(
                f"{self._folder.state} has no room for {byte_count} bytes of device memory",
                hint="delete images (`phos rm`) or give the store a larger disk",
            )
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(self._make, [size] * missing))

    def drop(self) -> None:
        """Remove the spare packs that no image has taken."""
        with self._folder.locked():
            for path in self._folder.spare_paths():
                path.unlink()

    def _make(self, size: int) -> None:
        path = self._folder.packs / f"{secrets.token_hex(8)}.spare"
        with self._folder.locked():
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            with private_files.space_errors(str(path)):
                os.posix_fallocate(fd, 0, size)
        except BaseException:
            path.unlink()
            raise
        finally:
            private_files.close_locked(fd)
