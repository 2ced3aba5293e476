"""List the TCP sockets of a network namespace, from ``/proc/net/tcp``."""

import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from phosd.engine.system import procfs

Place = tuple[str, int]
"""An address and a port; an IPv4 address is written as one, also in a socket for IPv6."""


class State(IntEnum):
    """States of a socket (``net/tcp_states.h``), without those that no descriptor has."""

    ESTABLISHED = 1
    FINISHED_BUT_NOT_READ = 4
    FINISHED = 5
    CLOSED = 7
    PEER_FINISHED = 8
    LISTENING = 10


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
    found: list[TcpSocket] = []
    for table in ("tcp", "tcp6"):
        path = procfs.PROC / str(pid) / "net" / table
        if path.exists():  # tcp6 is missing if IPv6 is switched off
            found += _rows(path.read_text())
    return found


def place(address: str, port: int) -> Place:
    """Return the place of an address as the kernel or Python writes it."""
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found), port


def _rows(text: str) -> Iterator[TcpSocket]:
    for line in text.splitlines()[1:]:
        row = line.split()
        yield TcpSocket(int(row[9]), int(row[3], 16), _place(row[1]), _place(row[2]))


def _place(word: str) -> Place:
    """Read an address of words in the host's byte order, and a port."""
    address, port = word.split(":")
    words = [int(address[at : at + 8], 16) for at in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return place(socket.inet_ntop(family, packed), int(port, 16))
