"""Notice that somebody keeps CRIU from running, and continue it.

A user's CRIU has that user's id: the user may stop it by a signal, as often as they like, or freeze
the program that it works on. Nobody else's job may wait for that.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from phosd.engine.criu.run.owned_processes import is_criu
from phosd.engine.system import procfs

STOPPED_SECONDS = 10.0
"""How long a CRIU that is stopped again and again is continued before it is given up."""
IDLE_SECONDS = 30.0
"""How long a CRIU that was told to give up may do nothing at all."""
_PAUSE = 0.2

_FILE_CALLS = frozenset(
    (
        *(2, 257, 3),  # open, openat, close
        *(4, 5, 6, 262, 332, 137, 138),  # stat, fstat, lstat, newfstatat, statx, statfs, fstatfs
        *(89, 267, 217, 191, 192, 193),  # readlink, readlinkat, getdents64, *getxattr
        *(8, 17, 18, 40, 77, 285),  # lseek, pread64, pwrite64, sendfile, ftruncate, fallocate
        *(86, 87, 263, 265, 82, 264, 258),  # link, unlink, unlinkat, linkat, rename*, mkdirat
    )
)
"""System calls (x86-64) that wait for nothing but a file system."""


class CriuWatchdog:
    """Notices what keeps the CRIU that process ``first`` is, or has started, from running."""

    def __init__(self, first: int) -> None:
        self._first = first
        self._next = 0.0
        self._stopped_since: float | None = None
        self.persists = False
        """Whether CRIU was stopped still, :data:`STOPPED_SECONDS` after it was first continued."""
        self.waits = False
        """Whether CRIU waits for a disk or a file system, and cannot be killed meanwhile."""
        self._ticks = -1
        self._busy_at = time.monotonic()

    @property
    def idle(self) -> float:
        """The seconds since CRIU was last seen to use the CPU."""
        return time.monotonic() - self._busy_at

    def forget(self) -> None:
        """Begin anew: CRIU was told to give up, and has as much time for that."""
        self._stopped_since = None
        self.persists = False
        self._busy_at = time.monotonic()

    def look(self, *, helpers: bool = False) -> None:
        """Continue CRIU if it is stopped; with ``helpers`` also all that it has started.

        A restoring CRIU starts the program itself, which may have been saved while it was stopped.
        """
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PAUSE
        ticks = 0
        self.waits = False
        for pid in _family(self._first):
            found = procfs.stat(pid)
            if found is None or not (helpers or is_criu(pid)):
                continue
            ticks += found.cpu_ticks
            self.waits |= found.state == "D" or procfs.system_call(pid) in _FILE_CALLS
            if found.state == "T":  # and not "t": only root can trace it
                self._continue(pid, now)
            if not helpers:
                break  # below it are those that it makes
        if ticks != self._ticks:
            self._ticks, self._busy_at = ticks, now

    def _continue(self, pid: int, now: float) -> None:
        if self._stopped_since is None:
            self._stopped_since = now
        self.persists = now - self._stopped_since > STOPPED_SECONDS
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its parent waits for it
            os.kill(pid, signal.SIGCONT)


def _family(first: int) -> Iterator[int]:
    """Yield a process and all below it, parents first."""
    yield first
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        for child in procfs.children(first):
            yield from _family(child)
