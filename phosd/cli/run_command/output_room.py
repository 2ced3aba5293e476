"""Keep room on the disk for what a program is about to print, and say when there is none.

Its output goes to files. On a full disk its own write fails, so most programs end, and their last
words are lost, too. So blocks behind the end of these files are taken in advance (fallocate(2)),
and given back when the program has ended.
"""

import ctypes
import errno
import fcntl
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from phosd.cli.run_command.program import runs_folder

AHEAD = 256 << 10
"""Bytes that each file may grow by when the disk is full."""
_KEEP_SIZE = 1
"""``FALLOC_FL_KEEP_SIZE`` (linux/falloc.h)."""
_FULL = (errno.ENOSPC, errno.EDQUOT)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class OutputRoom:
    """Room for the files among ``outputs`` that `phos run` has made. ``note`` tells the user."""

    def __init__(self, pid: int, outputs: Sequence[Path], note: Callable[[str], None]) -> None:
        self._pid = pid
        self._note = note
        self._files: dict[int, int] = {}
        self._folder = Path()
        self._why = ""
        self._opened = ExitStack()
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        for path in outputs:
            if path.parent.parent == runs_folder():
                with suppress(OSError):  # it was removed meanwhile
                    file = os.open(path, flags)
                    self._opened.callback(_give_back, file)
                    self._files[file] = 0
                    self._folder = path.parent

    def __enter__(self) -> Self:
        self.look()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def look(self) -> None:
        """Take room for what comes next; say it once if there is none."""
        why = ""
        for file, taken in self._files.items():
            size = os.fstat(file).st_size
            if size + AHEAD // 2 > taken:
                if why := _take(file, size):
                    break
                self._files[file] = size + AHEAD
        if why and not self._why:
            self._note(
                f"phos: there is no room for the output of process {self._pid} in {self._folder}: "
                f"{why}; {AHEAD >> 11} KiB more fit, and then its output fails, which ends most "
                "programs: make room there"
            )
        self._why = why

    def tell_end(self, status: int | None) -> None:
        """Say that a program that has failed had no room for its output, perhaps for that."""
        self.look()
        if self._why and status not in (None, 0, -signal.SIGKILL):
            self._note(
                f"phos: process {self._pid} has ended while there was no room for its output in "
                f"{self._folder} ({self._why}), perhaps for that, and what it said last may be "
                "lost; make room there, or set XDG_STATE_HOME to a folder on a disk with more, and "
                "start it again"
            )


def why_full(folder: Path) -> str:
    """Return why a program's output has no room in a folder; empty if it has. Raises
    :class:`OSError`.
    """
    place = folder / "room"
    file = os.open(place, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return _take(file, 0)
    finally:
        place.unlink()
        os.close(file)


def _take(file: int, size: int) -> str:
    """Take blocks behind the end of a file. Returns why that cannot be; empty: it can."""
    if _libc.fallocate(file, _KEEP_SIZE, size, AHEAD) == 0:
        return ""
    number = ctypes.get_errno()
    if number not in _FULL:  # a file system that cannot do that
        number = errno.ENOSPC if os.fstatvfs(file).f_bavail == 0 else 0
    return os.strerror(number) if number else ""


def _give_back(file: int) -> None:
    """Give back the blocks behind the end of a file, and close it. Nothing is done while others may
    write to it, as what it grew by meanwhile would be cut off.
    """
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # of somebody who opens it just now
    try:
        with suppress(OSError):  # others have it open
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            os.ftruncate(file, os.fstat(file).st_size)
    finally:
        os.close(file)
        signal.signal(signal.SIGIO, before)
