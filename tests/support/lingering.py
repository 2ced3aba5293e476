"""Send somebody a socket that nobody can close without waiting for years."""

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator

from tests.support.harness import wait_until

_YEARS = 1 << 30
_PATIENCE = 120


@contextlib.contextmanager
def lingering() -> Iterator[socket.socket]:
    """Yield a socket whose last close waits, until the end: its peer does not read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        mine = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
    mine.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            mine.send(bytes(1 << 16))
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, _YEARS))
    try:
        yield mine
    finally:
        reader = threading.Thread(target=_drop, args=(peer,), daemon=True)
        reader.start()
        mine.close()
        reader.join(_PATIENCE)


def _drop(peer: socket.socket) -> None:
    """Read what is left, so that nothing is to be waited for, and reset the connection. The reset
    alone does not do: a process that is just being started may have a copy.
    """
    peer.settimeout(0.2)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with peer, contextlib.suppress(TimeoutError, ConnectionResetError):
        while peer.recv(1 << 20):
            pass


@contextlib.contextmanager
def lingering_in(connection: socket.socket, data: bytes = b"x") -> Iterator[bool]:
    """Leave such a socket in a connection inside, and nowhere else. Yields False if the other
    side takes none; the data alone was sent then.
    """
    refused: list[OSError] = []
    tried = threading.Event()

    def send(mine: socket.socket) -> None:
        try:
            socket.send_fds(connection, [data], [mine.fileno()])
        except OSError as error:
            refused.append(error)
            with contextlib.suppress(OSError):
                connection.send(data)
        tried.set()
        if not refused:
            mine.close()  # if it is the last one, this waits itself

    with lingering() as mine:
        known = os.fstat(mine.fileno())
        number = mine.fileno()
        sender = threading.Thread(target=send, args=(mine,), daemon=True)
        sender.start()
        assert tried.wait(_PATIENCE)
        if not refused:  # what is started from now on must not get it
            wait_until(lambda: not _is(number, known), "the sender's close", _PATIENCE)
        yield not refused
    sender.join(_PATIENCE)
    assert not sender.is_alive()


def _is(descriptor: int, known: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), known)
    except OSError:
        return False
