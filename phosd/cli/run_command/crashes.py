"""Count how often a program has crashed soon after it was restored from an image."""

import json
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
        with suppress(OSError):  # the next time it is tried from the same image again
            self._path.write_text(json.dumps(counts))
        return counts[image]

    def _read(self) -> dict[str, int]:
        with suppress(OSError, ValueError):
            if self._path is not None and self._path.stat().st_size <= _MOST_BYTES:
                found = json.loads(self._path.read_text())
                return {str(image): int(count) for image, count in found.items()}
        return {}
