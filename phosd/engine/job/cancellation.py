"""How whoever began something has it stopped."""

import threading
from dataclasses import dataclass, field

from phosd.errors import Cancelled


@dataclass
class Cancellation:
    """Ask an operation to stop, from any thread. The operation looks wherever it may."""

    _asked: threading.Event = field(default_factory=threading.Event, init=False, repr=False)

    def cancel(self) -> None:
        """Ask the operation to stop at its next safe point."""
        self._asked.set()

    def check(self) -> None:
        """Raise :class:`Cancelled` if that was asked for."""
        if self._asked.is_set():
            raise Cancelled("the job was cancelled", hint="start it again when you are ready")
