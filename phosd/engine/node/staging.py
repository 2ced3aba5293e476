"""Folders in memory for CRIU's files, which wait there to be written to the disk."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from phosd.errors import Internal

MEMORY = Path("/dev/shm")
_STAGING = "phosd-"


class Staging:
    """Takes at most ``limit`` bytes of memory at a time for a folder, None for what is free."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit

    @contextlib.contextmanager
    def folder(self, byte_count: int) -> Iterator[Path | None]:
        """A folder in memory for about ``byte_count`` bytes of CRIU's files, gone afterwards.

        None when that is more than may be kept in memory: then they go to the disk at once.
        """
        if byte_count > self._free_bytes():
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

    def sweep(self) -> None:
        """Remove the folders that engines which were killed have left: nobody holds their lock.

        Everybody may write to the folder that they are in.
        """
        for folder in MEMORY.glob(f"{_STAGING}*"):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError, BlockingIOError):
                lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    if os.fstat(lock).st_uid == os.geteuid():
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(folder)
                finally:
                    os.close(lock)

    def _free_bytes(self) -> int:
        """What may be in memory: the configured limit, and what is really free there."""
        try:
            status = os.statvfs(MEMORY)
        except FileNotFoundError:
            return 0
        free = min(status.f_bavail * status.f_frsize, available_memory() // 2)
        return free if self._limit is None else min(self._limit, free)


def _locked_folder() -> tuple[Path, int]:
    """A new folder in memory, and the descriptor whose lock says that somebody uses it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_STAGING, dir=MEMORY))
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
