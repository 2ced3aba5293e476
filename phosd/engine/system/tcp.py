"""List the TCP sockets of a network namespace, from ``/proc/net/tcp``, and forget ended ones."""

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from phosd.engine.system import procfs, sock_diag

_SOCK_DESTROY = 21
_NLM_F_REQUEST_ACK = 0x5
_ANY_COOKIE = b"\xff" * 8
_INFO = 2
"""``INET_DIAG_INFO`` (``linux/inet_diag.h``), and where an answer has its inode and the rest."""
_INODE_AT, _ATTRIBUTES_AT = 68, 72
_SENT_AT, _GOT_AT, _SEGMENTS_AT = 44, 52, 152
_LATELY_MS = 600_000

Place = tuple[str, int]
"""An address and a port; an IPv4 address is written as one, also in a socket for IPv6."""


class State(IntEnum):
    """States of a socket (``net/tcp_states.h``). ``ENDED`` is ``TIME_WAIT``."""

    ESTABLISHED = 1
    FINISHED_BUT_NOT_READ = 4
    FINISHED = 5
    ENDED = 6
    CLOSED = 7
    PEER_FINISHED = 8
    LISTENING = 10


_OPEN = 1 << State.ESTABLISHED | 1 << State.PEER_FINISHED


@dataclass(frozen=True)
class TcpSocket:
    """A TCP socket. ``inode`` is 0 if no process has it open, as while it waits to be accepted."""

    inode: int
    state: int
    here: Place
    there: Place

    @property
    def connected(self) -> bool:
        return self.state not in (State.LISTENING, State.CLOSED)

    @property
    def on_this_host(self) -> bool:
        """Whether the other end is on this host, as far as its address tells."""
        return self.here[0] == self.there[0] or ipaddress.ip_address(self.there[0]).is_loopback


def tcp_sockets(pid: int) -> list[TcpSocket]:
    """Return the TCP sockets in the network namespace of ``pid``."""
    return _sockets(pid, ("tcp", "tcp6"))


def unread(pid: int, inodes: Collection[int]) -> bool:
    """Return whether something waits to be read on one of these TCP connections there."""
    for table in ("tcp", "tcp6"):
        path = procfs.PROC / str(pid) / "net" / table
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            row = line.split()  # of the rest, addresses take most of the time
            if int(row[9]) in inodes and _unread_in(row):
                return True
    return False


def unanswered(inodes: Collection[int]) -> bool:
    """Return whether something has come on one of these connections of the own network, within ten
    minutes, and nothing was sent since.
    """
    for family in (socket.AF_INET, socket.AF_INET6):
        request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _OPEN)
        with sock_diag.link() as link:
            sock_diag.ask(link, sock_diag.BY_FAMILY, sock_diag.DUMP, request)
            for message in sock_diag.answers(link, "cannot ask for connections"):
                (inode,) = struct.unpack_from("=I", message, _INODE_AT)
                if inode in inodes and _is_unanswered(message[_ATTRIBUTES_AT:]):
                    return True
    return False


def _is_unanswered(attributes: bytes) -> bool:
    """Read ``struct tcp_info`` (``linux/tcp.h``): how many milliseconds ago data came and went,
    both since the connection began, and how many segments of each.
    """
    for kind, value in sock_diag.attributes(attributes):
        if kind == _INFO and len(value) >= _SEGMENTS_AT + 8:
            (sent,), (got,) = (struct.unpack_from("=I", value, at) for at in (_SENT_AT, _GOT_AT))
            came, went = struct.unpack_from("=II", value, _SEGMENTS_AT)
            return bool(came and got < _LATELY_MS and (not went or got < sent))
    return False


def udp_sockets(pid: int) -> list[TcpSocket]:
    """Return the bound UDP sockets there, of which only the addresses mean the same."""
    return _sockets(pid, ("udp", "udp6"))


def _sockets(pid: int, tables: Iterable[str]) -> list[TcpSocket]:
    found: list[TcpSocket] = []
    for table in tables:
        path = procfs.PROC / str(pid) / "net" / table
        if path.exists():  # those of IPv6 are missing if that is switched off
            found += _rows(path.read_text())
    return found


def forget_ended(ports: Collection[int]) -> None:
    """Make the kernel forget the connections that have ended at these ports of the own network.

    A kernel that cannot (``CONFIG_INET_DIAG_DESTROY``) keeps them for a minute.
    """
    ended = [
        each
        for each in tcp_sockets(os.getpid())
        if each.state == State.ENDED and each.here[1] in ports
    ]
    if not ended:
        return
    with sock_diag.link() as link:
        for each in ended:
            try:
                _destroy(link, each)
            except FileNotFoundError:
                continue  # the kernel has forgotten it by itself
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EPERM):
                    raise
                return


def _destroy(link: socket.socket, ended: TcpSocket) -> None:
    """Send ``SOCK_DESTROY`` (``linux/inet_diag.h``); raise what the kernel answers."""
    family = socket.AF_INET6 if ":" in ended.here[0] else socket.AF_INET
    addresses = [
        socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (ended.here, ended.there)
    ]
    ports = struct.pack("!HH", ended.here[1], ended.there[1])
    identity = b"".join((ports, *addresses, bytes(4), _ANY_COOKIE))
    request = struct.pack("=BBxxI", family, socket.IPPROTO_TCP, 1 << State.ENDED) + identity
    sock_diag.ask(link, _SOCK_DESTROY, _NLM_F_REQUEST_ACK, request)
    error = sock_diag.error_of(link.recv(1 << 16), "cannot forget an ended connection")
    if error.errno:
        raise error


def place(address: str, port: int) -> Place:
    """Return the place of an address as the kernel or Python writes it."""
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found), port


def _rows(text: str) -> Iterator[TcpSocket]:
    for line in text.splitlines()[1:]:
        row = line.split()
        yield TcpSocket(int(row[9]), int(row[3], 16), _place(row[1]), _place(row[2]))


def _unread_in(row: Sequence[str]) -> int:
    """Return how many bytes wait to be read: the kernel counts the connection's end, too."""
    ended = int(row[3], 16) == State.PEER_FINISHED
    return int(row[4].rpartition(":")[2], 16) - ended


def _place(word: str) -> Place:
    """Read an address of words in the host's byte order, and a port."""
    address, port = word.split(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return place(socket.inet_ntop(family, packed), int(port, 16))
