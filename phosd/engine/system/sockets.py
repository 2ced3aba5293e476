"""List the machine's sockets by inode, and which unix sockets are connected, and to whom."""

import errno
import os
import socket
import struct
from dataclasses import dataclass

from phosd.engine.system import procfs, sock_diag

_UDIAG_SHOW_NAME = 1
_UDIAG_SHOW_PEER = 4
_UNIX_DIAG_NAME = 0
_UNIX_DIAG_PEER = 2
_TCP_LISTEN = 10
_STREAM, _DATAGRAM = socket.SOCK_STREAM, socket.SOCK_DGRAM


@dataclass(frozen=True)
class UnixSocket:
    """A unix socket. ``name`` is its bound path; ``peer`` the inode of the other end, or None."""

    inode: int
    kind: int
    listening: bool
    name: str
    peer: int | None

    @property
    def stream(self) -> bool:
        return self.kind == _STREAM

    @property
    def datagram(self) -> bool:
        return self.kind == _DATAGRAM


def unix_sockets() -> dict[int, UnixSocket]:
    """Return every unix socket of this network namespace (``linux/unix_diag.h``)."""
    request = struct.pack(
        "BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, 5, 0xFFFFFFFF, 0xFFFFFFFF
    )
    with sock_diag.link() as link:
        sock_diag.ask(link, sock_diag.BY_FAMILY, sock_diag.DUMP, request)
        messages = sock_diag.answers(link, "cannot list the unix sockets")
        return {found.inode: found for found in map(_unix_socket, messages)}


def _unix_socket(message: bytes) -> UnixSocket:
    _, kind, state, _, inode = struct.unpack_from("BBBBI", message)
    name, peer = "", None
    for attribute, value in sock_diag.attributes(message[16:]):
        if attribute == _UNIX_DIAG_NAME:
            name = os.fsdecode(value.rstrip(b"\0").replace(b"\0", b"@"))
        elif attribute == _UNIX_DIAG_PEER:
            peer = struct.unpack("I", value)[0]
    return UnixSocket(inode, kind, state == _TCP_LISTEN, name, peer)


def protocol(descriptor: procfs.Descriptor) -> str:
    """Return the kernel's name of a socket's protocol, such as ``TCP``, ``UNIX``, ``AF_VSOCK``.

    Raises :class:`FileNotFoundError` if the process has closed it; the number may be that of
    another file by now.
    """
    link = procfs.PROC / str(descriptor.pid) / "fd" / str(descriptor.number)
    try:
        return os.getxattr(link, "system.sockprotoname").rstrip(b"\0").decode()
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            raise FileNotFoundError(errno.ENOENT, "not a socket any more", str(link)) from error
        raise
