"""Read the end of a program's output, whatever the file is and however slow its file system.

A program's owner decides what the path names. A file is opened only once it is known to be a
regular one, and never waited for by the screens.
"""

import asyncio
import os
import re
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from phosd.tui.text import plain

_MOST = 16 << 10
"""Bytes to read from the end."""
_MOST_LINES = 200
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
"""Terminal commands, such as colours, that logs are full of."""


class Tails:
    """A thread that reads the ends of files, one at a time. ``deliver`` gets path and lines on the
    event loop; a file system that does not answer holds up the thread only.
    """

    def __init__(self, deliver: Callable[[str, list[str]], None]) -> None:
        self._deliver = deliver
        self._wanted: SimpleQueue[str] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._busy = False

    def want(self, path: str) -> None:
        """Read the end of a file, unless the last one is still being read."""
        if self._busy:
            return
        self._busy = True
        if self._thread is None:
            loop = asyncio.get_running_loop()
            self._thread = threading.Thread(
                target=self._work, args=(loop,), name="phos-output", daemon=True
            )
            self._thread.start()
        self._wanted.put(path)

    def stop(self) -> None:
        """End the thread, once it is through with its file."""
        self._wanted.put("")

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while path := self._wanted.get():
            lines = tail(path)
            with suppress(RuntimeError):  # the screens have ended
                loop.call_soon_threadsafe(self._done, path, lines)

    def _done(self, path: str, lines: list[str]) -> None:
        self._busy = False
        self._deliver(path, lines)


def tail(path: str) -> list[str]:
    """Return the last lines of a regular file, safe for the terminal; why there are none, if it
    cannot be read.
    """
    try:
        file = _open(path)
    except OSError as error:
        return [f"({error.strerror or error})"]
    if file is None:
        return ["(no regular file)"]
    try:
        size = os.fstat(file).st_size
        text = os.pread(file, _MOST, max(0, size - _MOST)).decode(errors="replace")
    except OSError as error:
        return [f"({error.strerror or error})"]
    finally:
        os.close(file)
    lines = text.removesuffix("\n").split("\n")
    return [_shown(line) for line in lines[1 if size > _MOST else 0 :][-_MOST_LINES:]]


def _open(path: str) -> int | None:
    """Open a file to read; None if it is no regular file. Nothing else is opened: to open a device
    may do something, and a pipe may wait.
    """
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            return None
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        return os.open(f"/proc/self/fd/{place}", flags)
    finally:
        os.close(place)


def _shown(line: str) -> str:
    """Return a line as a terminal shows it: of a progress bar, what was drawn last."""
    return plain(_COLOURS.sub("", line).rstrip("\r").rpartition("\r")[2].expandtabs(4))
