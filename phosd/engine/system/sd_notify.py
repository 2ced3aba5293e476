"""Report the state of this process to systemd: the protocol of ``sd_notify(3)``.

Without ``NOTIFY_SOCKET`` everything here does nothing.
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator

EXTENSION_SECONDS = 60.0
"""Seconds by which a pending stop is extended each time."""
_MOST_PROLONGED = 15
_SECONDS_TO_SEND = 1.0
_log = logging.getLogger(__name__)


class Supervisor:
    """The service manager at the other end of ``NOTIFY_SOCKET``, if there is one.

    Removes its variables from the environment: they are for this process, not for those it starts.
    """

    def __init__(self) -> None:
        self._address = _address(os.environ.pop("NOTIFY_SOCKET", ""))
        self._status = ""
        self._reported = False
        interval = os.environ.pop("WATCHDOG_USEC", "")
        meant = os.environ.pop("WATCHDOG_PID", "") in ("", str(os.getpid()))
        self.watchdog = int(interval) / 1e6 if interval.isdigit() and meant else 0.0
        """Seconds within which systemd expects a watchdog message; 0 for never."""

    def ready(self) -> None:
        """Report that the process has started, or reloaded its configuration."""
        self._tell("READY=1")

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Report a reload of the configuration for the duration of the context."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self.ready()

    def stopping(self) -> None:
        """Report that the daemon is about to end."""
        self._tell("STOPPING=1")

    def status(self, text: str) -> None:
        """Set the status line that ``systemctl status`` shows."""
        if text != self._status:
            self._status = text
            self._tell("STATUS=" + text.replace("\n", " "))

    async def feed(self) -> None:
        """Feed the watchdog for ever. Run it on the event loop: if that hangs, systemd kills us."""
        import asyncio  # not at the top, as data movers need no asyncio

        while self.watchdog:
            self._tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog / 3)

    async def prolong(self) -> None:
        """Keep a start or a stop from timing out while this runs on the event loop.

        The number of extensions is limited, since what takes longer hangs.
        """
        import asyncio

        for _ in range(_MOST_PROLONGED):
            self._tell(f"EXTEND_TIMEOUT_USEC={int(EXTENSION_SECONDS * 1e6)}")
            await asyncio.sleep(EXTENSION_SECONDS / 3)

    def _tell(self, *lines: str) -> None:
        if self._address is None:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SECONDS_TO_SEND)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:  # systemd may be busy or gone; that is no reason to end
            if not self._reported:
                _log.warning("systemd cannot be told %s: %s", lines[0].partition("=")[0], error)
            self._reported = True
        else:
            self._reported = False


def _address(text: str) -> str | None:
    """Return the socket's address: a path, or ``@name`` for an abstract one."""
    if text.startswith("@") and len(text) > 1:
        return "\0" + text[1:]
    return text if text.startswith("/") else None
