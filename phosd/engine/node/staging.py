"""Create folders in memory for CRIU's files until they are written to the disk."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from phosd.engine.system.host_memory import available_memory
from phosd.engine.system.removal import remove_trees

MEMORY = Path("/dev/shm")
_STAGING = "phosd-"


class Staging:
    """Folders in memory of at most ``limit`` bytes each (None: all that is free)."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit

    @contextlib.contextmanager
    def folder(self, byte_count: int) -> Iterator[Path | None]:
        """Create a folder in memory for ``byte_count`` bytes of CRIU's files; remove it at the end.

        Yields None if that is more than may be kept in memory. It may no longer be free when it is
        allocated.
        """
        if byte_count > self._free_bytes():
            yield None
            return
        folder, lock = _locked_folder()
        try:
            yield folder
        finally:
            try:
                remove_trees([folder])
            finally:
                # Not before: another engine would take it for a leftover and remove it.
                os.close(lock)

    def sweep(self) -> None:
        """Remove the folders left by engines that were killed: their locks are free.

        Their parent folder is writable for everyone, so only folders of our own user are removed.
        """
        for folder in MEMORY.glob(f"{_STAGING}*"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, BlockingIOError):
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(lock).st_uid == os.geteuid():
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        remove_trees([folder])
                finally:
                    os.close(lock)

    def _free_bytes(self) -> int:
        """Return the bytes that may be in memory: the configured limit, or less if less is free."""
        try:
            status = os.statvfs(MEMORY)
        except FileNotFoundError:
            return 0
        free = min(status.f_bavail * status.f_frsize, available_memory() // 2)
        return free if self._limit is None else min(self._limit, free)


def _locked_folder() -> tuple[Path, int]:
    """Create a folder in memory; return it with the descriptor whose lock marks it as in use."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=MEMORY))
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return folder, lock
        os.close(lock)  # another engine took it for a leftover
