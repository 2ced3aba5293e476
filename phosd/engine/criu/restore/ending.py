"""Hear from the restore shim how the first process of a tree has ended, if that is soon.

A program that was saved in its last moments ends by itself as soon as it is restored: that is no
restore that has failed, and what it wrote stays.
"""

import os
import select
from contextlib import suppress

_MOST = 64
_PATIENCE_MS = 1000


class Ending:
    """A pipe from the shim. Call :meth:`started` when the shim has its end, and :meth:`close`."""

    def __init__(self) -> None:
        self._told, self.tell = os.pipe()
        self._code: int | None = None

    def started(self) -> None:
        """Close the shim's end here: the end of the shim is noticed then."""
        if self.tell >= 0:
            os.close(self.tell)
        self.tell = -1

    @property
    def code(self) -> int | None:
        """The exit code with which the process has ended by itself. None: it has not ended, a
        signal has ended it, or the shim does not tell. Ask when it is not there any more.
        """
        if self._code is None and self._told >= 0 and self.tell < 0:
            poller = select.poll()
            poller.register(self._told, select.POLLIN)
            kind, _, number = self._text(poller).partition(b" ")
            with suppress(ValueError):  # the shim is the user's by then
                self._code = int(number) & 0xFF if kind == b"exit" else None
        return self._code

    def _text(self, poller: select.poll) -> bytes:
        return os.read(self._told, _MOST) if poller.poll(_PATIENCE_MS) else b""

    def close(self) -> None:
        self.started()
        if self._told >= 0:
            os.close(self._told)
        self._told = -1
