"""Let the caller of an operation stop it."""

import threading
from dataclasses import dataclass, field

from phosd.errors import Cancelled


@dataclass
class Cancellation:
    """A request to stop an operation, from any thread. The operation checks for it."""

    _asked: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def cancel(self) -> None:
        """Ask the operation to stop at its next safe point."""
        self._asked.set()

    def check(self) -> None:
        """Raise :class:`Cancelled` if :meth:`cancel` was called."""
        if self._asked.is_set():
            raise Cancelled("the job was cancelled", hint="start it again when you are ready")

    def held_up(self) -> None:
        """Report that the operation cannot end, though it was given up, before others let it."""
