"""Serve connections of unix sockets on the event loop."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator

from phosd import unix_sockets

_AGAIN = 1.0
"""Seconds after which a connection is accepted again, after that has failed."""
_AT_ONCE = 256
"""Most connections that are accepted before others have a turn."""
_PAUSE = 0.02
"""Seconds in which connections gather, to be accepted together: waking the loop takes time."""
_log = logging.getLogger(__name__)


async def accepted(listener: socket.socket) -> AsyncIterator[socket.socket]:
    """Yield each connection, for the caller to close by :func:`unix_sockets.close`. A client that
    connects again and again does not hold up the loop.
    """
    while True:
        await readable(listener)
        for _ in range(_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                break
            except OSError as error:  # no descriptor is left
                _log.error("nobody can connect to %s: %s", listener.getsockname(), error)
                await asyncio.sleep(_AGAIN)
                break
            connection.setblocking(False)
            yield connection
        await asyncio.sleep(_PAUSE)


async def readable(connection: socket.socket) -> None:
    """Wait until something has come, or the other side has ended the connection."""
    loop, woken = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, woken.set)
    try:
        await woken.wait()
    finally:
        loop.remove_reader(connection)


async def receive(connection: socket.socket, size: int) -> bytes:
    """Return the next ``size`` bytes.

    Raises :class:`EOFError` if the connection ends before, and
    :class:`~phosd.unix_sockets.DescriptorsSent`.
    """
    data = b""
    while len(data) < size:
        await readable(connection)
        part = unix_sockets.receive(connection, size - len(data))
        if not part:
            raise EOFError(f"the connection has ended after {len(data)} of {size} bytes")
        data += part
    return data
