"""Ask the kernel about sockets, by netlink (``sock_diag(7)``)."""

import os
import socket
import struct

NETLINK_SOCK_DIAG = 4
HEADER_BYTES = 16


def link() -> socket.socket:
    """Return a connection to the kernel."""
    return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG)


def ask(link: socket.socket, kind: int, flags: int, request: bytes) -> None:
    """Send a request."""
    header = struct.pack("=IHHII", HEADER_BYTES + len(request), kind, flags, 1, 0)
    link.send(header + request)


def error_of(answer: bytes, what: str) -> OSError:
    """Return what an ``NLMSG_ERROR`` says; its number is 0 if the request was carried out."""
    number = -struct.unpack_from("=i", answer, HEADER_BYTES)[0]
    return OSError(number, f"{what}: {os.strerror(number)}")
