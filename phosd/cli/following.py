"""Show what a program writes to its output files, as it comes, until it has ended."""

import os
import select
import stat
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from phosd.cli.settings import Settings

_LOOK_MS = 200
_CHUNK = 1 << 16


class Output:
    """The output files of a program, the standard one first, as they are before it goes on."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._ends: dict[str, int] = {}
        for path in paths:
            self._ends[path] = 0
            with suppress(OSError):  # it is made when the program goes on
                self._ends[path] = Path(path).stat().st_size

    def show(self, settings: Settings, pid: int) -> None:
        """Print what comes from here on, until the program ends, or the user interrupts: then the
        program goes on alone.
        """
        if not self._ends:
            settings.note("phos: it has no output files to follow")
            return
        with ExitStack() as opened, suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            opened.callback(os.close, pidfd)
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            files = dict[str, int]()
            try:
                over = False
                while not over:
                    over = bool(ended.poll(_LOOK_MS))  # what it wrote last comes, too
                    for path in self._ends.keys() - files.keys():
                        if (file := _open(path)) is not None:
                            files[path] = file
                            opened.callback(os.close, file)
                    self._print(files)
            except KeyboardInterrupt:
                settings.note(f"phos: process {pid} goes on, and so does its output")

    def _print(self, files: dict[str, int]) -> None:
        for number, path in enumerate(self._ends):
            stream = (sys.stderr if number else sys.stdout).buffer
            while path in files and (piece := os.pread(files[path], _CHUNK, self._ends[path])):
                self._ends[path] += len(piece)
                stream.write(piece)
            stream.flush()


def _open(path: str) -> int | None:
    """Open a regular file to read; None if there is none, or not for us."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    return None
