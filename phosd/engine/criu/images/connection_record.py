"""What an image says of TCP connections: its limits, and what restore requires of it.

An image may come from anywhere, and it is root who makes the connections for the program's user.
"""

import ipaddress
import socket

from phosd.engine.image.cpu_manifest import Connection, ConnectionEnd, SocketOption
from phosd.engine.system import procfs
from phosd.errors import ImageCorrupt

UNREAD = "tcp-unread.bin"
"""File in the tree's folder: what had arrived, end after end."""
MOST = 100
"""Most connections of a tree: each descriptor of a restore is passed to CRIU, at most 250."""
MOST_UNREAD = 64 << 20
"""Most bytes that may wait at the ends of all of them: they are held in memory."""
SO_SNDBUFFORCE, SO_RCVBUFFORCE, SO_BUF_LOCK = 32, 33, 72
"""``asm-generic/socket.h``"""
USERS_PRIORITIES = range(7)
"""Values of ``SO_PRIORITY`` that a user may set (``socket(7)``)."""

OPTIONS = {
    (socket.SOL_SOCKET, number): size
    for number, size in (
        (socket.SO_KEEPALIVE, 4),
        (socket.SO_OOBINLINE, 4),
        (socket.SO_PRIORITY, 4),
        (socket.SO_RCVLOWAT, 4),
        (socket.SO_LINGER, 8),
        (socket.SO_RCVTIMEO, 16),
        (socket.SO_SNDTIMEO, 16),
        (socket.SO_SNDBUF, 4),
        (socket.SO_RCVBUF, 4),
        (SO_BUF_LOCK, 4),
        (socket.SO_REUSEADDR, 4),
        (socket.SO_REUSEPORT, 4),
    )
} | {
    (socket.IPPROTO_TCP, number): 4
    for number in (
        socket.TCP_NODELAY,
        socket.TCP_CORK,
        socket.TCP_KEEPIDLE,
        socket.TCP_KEEPINTVL,
        socket.TCP_KEEPCNT,
        socket.TCP_SYNCNT,
        socket.TCP_LINGER2,
        socket.TCP_USER_TIMEOUT,
        socket.TCP_NOTSENT_LOWAT,
    )
}
"""The options that are saved, by level and number, and the sizes of their values. The sizes of the
buffers come before their locks, which setting a size sets."""

_PRIORITY = (socket.SOL_SOCKET, socket.SO_PRIORITY)
_ADDRESS_WORDS = {int(socket.AF_INET): 2, int(socket.AF_INET6): 4}


def first_port() -> int:
    """Return the first port that a user may listen at."""
    return int((procfs.PROC / "sys/net/ipv4/ip_unprivileged_port_start").read_text())


def require_sound(wanted: tuple[Connection, ...], size: int | None) -> None:
    """Raise :class:`ImageCorrupt` unless phosd could have saved these connections, with a file of
    ``size`` bytes of what had arrived (None: there is none).
    """
    ends = [end for connection in wanted for end in connection.ends]
    inodes = [end.inode for end in ends if end.inode]
    if not (
        len(wanted) <= MOST
        and len(set(inodes)) == len(inodes)
        and all(any(end.inode for end in connection.ends) for connection in wanted)
        and all(_sound(end) for end in ends)
        and sum(end.unread for end in ends) == (size or 0) <= MOST_UNREAD
    ):
        raise ImageCorrupt(
            "what the image says of TCP connections is not what was saved",
            hint="restore another image; this one is damaged",
        )


def _sound(end: ConnectionEnd) -> bool:
    closed = end.inode == 0
    return (
        0 <= end.inode < 1 << 32
        and end.unread >= 0
        and not (closed and (end.unread or end.finished or end.deaf))
        and end.flags in range(1 << 32)
        and _is_address(end)
        and all(_is_option(option) for option in end.options)
    )


def _is_address(end: ConnectionEnd) -> bool:
    """Whether it is one in figures: a name would be looked up."""
    if len(end.address) != _ADDRESS_WORDS.get(end.family):
        return False
    host, *numbers = end.address
    if not isinstance(host, str) or not all(isinstance(each, int) for each in numbers):
        return False
    port, *of_version_6 = numbers
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return False
    return (
        version == (4 if end.family == socket.AF_INET else 6)
        and port in range(1, 1 << 16)
        and all(each in range(1 << 32) for each in of_version_6)
    )


def _is_option(option: SocketOption) -> bool:
    key = (option.level, option.number)
    try:
        value = bytes.fromhex(option.value)
    except ValueError:
        return False
    if len(value) != OPTIONS.get(key):
        return False
    return key != _PRIORITY or int.from_bytes(value, "little") in USERS_PRIORITIES
