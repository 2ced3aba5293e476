"""Serve a page over HTTP to whoever connects, at a bounded cost.

Every user of the machine may connect, as often as they like, and ask nothing. A thread for each
connection, as the servers of the standard library have, makes all of phosd's threads wait for
thousands of others. Here one thread serves a bounded number, and who waits longest gives way.
"""

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from wsgiref.types import WSGIApplication

CONNECTIONS = 64
"""Most connections at a time. A request is answered long before as many others have come."""
TIMEOUT = 10.0
"""Seconds that a connection may take for its request and for reading the answer."""
REQUEST_BYTES = 8 << 10
"""Most bytes of a request."""
_WAITING = 128
"""Connections that may wait to be accepted."""
_AGAIN = 1.0
"""Seconds after which a connection is accepted again, after that has failed."""
_TOLD = {"accept": "HTTP_ACCEPT", "accept-encoding": "HTTP_ACCEPT_ENCODING"}
"""Headers that a page is told of, in lower case."""
_log = logging.getLogger(__name__)


class PageServer:
    """Answers each request by calling ``page``, in a thread of its own, one after the other.

    ``page`` is told the method, path and query of a request, and which answers are accepted. Raises
    :class:`OSError` when it cannot listen.
    """

    def __init__(self, host: str, port: int, page: WSGIApplication) -> None:
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._listener = socket.socket(family)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address)
            self._listener.listen(_WAITING)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._page = page
        self._open: dict[asyncio.Task[None], None] = {}
        """Connections, the oldest first."""
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving, and wait until nobody is served any more."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self) -> None:
        with self._listener, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._stopped.wait()
        accepting.cancel()  # who is still served is cancelled as the loop is closed

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:  # no descriptor is left
                _log.error("nobody can ask for metrics: %s", error.strerror)
                await asyncio.sleep(_AGAIN)
                continue
            if len(self._open) >= CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._answer(connection))
            self._open[task] = None
            task.add_done_callback(partial(self._ended, connection))
            await asyncio.sleep(0)  # who has asked already is answered before the next one comes

    def _ended(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        connection.close()
        self._open.pop(task, None)

    async def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError, EOFError):  # a timeout is an OSError
            async with asyncio.timeout(TIMEOUT):
                request = await self._request(connection)
                await self._loop.sock_sendall(connection, self._answered(request))

    async def _request(self, connection: socket.socket) -> bytes:
        """Return the head of a request. Raises :class:`EOFError` if it is too long, or never comes
        to its end.
        """
        request = b""
        while b"\r\n\r\n" not in request:
            part = await self._loop.sock_recv(connection, REQUEST_BYTES - len(request))
            if not part:  # as when there is no room for more
                raise EOFError("no whole request has come")
            request += part
        return request

    def _answered(self, request: bytes) -> bytes:
        head: list[str] = []
        written: list[bytes] = []

        def start(
            status: str, headers: list[tuple[str, str]], _: object = None, /
        ) -> Callable[[bytes], object]:
            head[:] = [status, *(f"{name}: {value}" for name, value in headers)]
            return written.append

        try:
            written += self._page(_environment(request), start)
        except Exception:
            _log.exception("metrics cannot be told")
            head, written = ["500 Internal Server Error"], []
        body = b"".join(written)
        head += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        return b"HTTP/1.0 " + "\r\n".join(head).encode("latin-1") + body


def _environment(request: bytes) -> dict[str, Any]:
    """Return what a request says, in the words of WSGI (PEP 3333)."""
    first, *lines = request.decode("latin-1").split("\r\n")
    method, _, rest = first.partition(" ")
    path, _, query = rest.partition(" ")[0].partition("?")
    told = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
    for line in lines:
        name, _, value = line.partition(":")
        if name.lower() in _TOLD:
            told[_TOLD[name.lower()]] = value.strip()
    return told
