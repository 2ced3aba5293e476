"""Count how often a program has crashed soon after it was restored from an image."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from phosd.cli.run_command.relay import SAVED
from phosd.client.errors import Exit

FILE = "crashes"
"""The file in a program's output folder that has the counts."""
SOON = 60.0
"""Seconds within which an end counts, if it is none that somebody wanted."""
MOST = 3
"""Crashes after which an image is left for the one before it."""
_WANTED = (
    Exit.DONE,
    SAVED,
    *(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)),
)
_MOST_BYTES = 1 << 20
_COMMON = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _COMMON


class Crashes:
    """The counts of a program with this output folder, which is its user's own; without a folder
    nothing is counted.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / FILE if folder is not None else None

    def of(self, image: str) -> int:
        """Return how often the program has crashed so, one after the other."""
        return self._read().get(image, 0)

    def ended(self, image: str, restored_at: float, code: int) -> int:
        """Note the end of the program with this exit code, restored at ``restored_at`` (monotonic).
        Returns how often it has crashed by now, or 0 if this was no crash.
        """
        if self._path is None or code in _WANTED:
            return 0
        counts = self._read()
        soon = time.monotonic() - restored_at < SOON
        counts[image] = counts.get(image, 0) + 1 if soon else 0
        # The program may have had any folder for its output: no link of others is followed.
        with suppress(OSError):  # the next time it is tried from the same image again
            file = os.open(self._path, _WRITE, 0o600)
            try:
                os.write(file, json.dumps(counts).encode())
            finally:
                os.close(file)
        return counts[image]

    def _read(self) -> dict[str, int]:
        if self._path is None:
            return {}
        with suppress(OSError, ValueError):
            file = os.open(self._path, os.O_RDONLY | _COMMON)
            try:
                found = json.loads(os.read(file, _MOST_BYTES))
            finally:
                os.close(file)
            return {str(image): int(count) for image, count in found.items()}
        return {}
