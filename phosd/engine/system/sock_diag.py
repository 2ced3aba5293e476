"""Ask the kernel about sockets, by netlink (``sock_diag(7)``)."""

import os
import socket
import struct
from collections.abc import Iterator

NETLINK_SOCK_DIAG = 4
HEADER_BYTES = 16
BY_FAMILY, DUMP = 20, 0x301
"""The kind and the flags of a request for all sockets of a family."""
_ERROR, _DONE = 2, 3


def link() -> socket.socket:
    """Return a connection to the kernel."""
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)


def ask(link: socket.socket, kind: int, flags: int, request: bytes) -> None:
    """Send a request."""
    header = struct.pack("=IHHII", HEADER_BYTES + len(request), kind, flags, 1, 0)
    link.send(header + request)


def answers(link: socket.socket, what: str) -> Iterator[bytes]:
    """Yield the messages that answer a request for all, without their headers. Raises
    :class:`OSError`.
    """
    while True:
        data = link.recv(1 << 16)
        while data:
            length, kind = struct.unpack_from("=IH", data)
            if kind == _DONE:
                return
            if kind == _ERROR:
                raise error_of(data, what)
            yield data[HEADER_BYTES:length]
            data = data[(length + 3) & ~3 :]


def attributes(rest: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the attributes behind a message: kind and value."""
    while len(rest) >= 4:
        length, kind = struct.unpack_from("=HH", rest)
        yield kind, rest[4:length]
        rest = rest[max((length + 3) & ~3, 4) :]


def error_of(answer: bytes, what: str) -> OSError:
    """Return what an ``NLMSG_ERROR`` says; its number is 0 if the request was carried out."""
    number = -struct.unpack_from("=i", answer, HEADER_BYTES)[0]
    return OSError(number, f"{what}: {os.strerror(number)}")
