"""Find the doors of a program: the sockets on which it listens, by which others call it.

A program that is frozen accepts nothing, and the kernel goes on for it: whoever connects waits in
the queue of the socket that listens, which becomes readable, and what is sent on a connection that
was accepted before waits to be read. So whether somebody calls is seen from outside, in a duplicate
of that socket, and without taking anything away.

Others may have the same sockets, and do with them what they like meanwhile. So phosd takes from
them nothing but whether they are readable, and whether they listen, and lets another process close
them (:mod:`phosd.unix_sockets`). Connections that were accepted are looked up in the kernel's
table, and not duplicated.
"""

import contextlib
import errno
import os
import re
import select
import socket
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from phosd import unix_sockets
from phosd.engine.system import procfs
from phosd.engine.system.foreign_descriptor import duplicate
from phosd.engine.system.freezer import with_those_below
from phosd.engine.system.procfs import ProcessId
from phosd.engine.system.tcp import State, TcpSocket, tcp_sockets, unanswered, unread
from phosd.errors import Reason, Unsupported
from phosd.units import counted

MOST = 256
"""Sockets on which one program may listen."""
MOST_PROCESSES = 4096
"""Processes of one program whose sockets are looked at."""
_ROW = re.compile(
    rb"[0-9a-f]{16}: [0-9A-F]{8} [0-9A-F]{8} ([0-9A-F]{8}) \w{4} \w\w +(\d{1,20}) ?(.*)"
)
"""A row of ``/proc/net/unix``: the flags, the inode and the name, in which may be anything."""
_ACCEPTS = 0x10000
"""The flag of a socket that listens there."""
_OURS = re.compile(rb"/hook/([0-9]+/)?[0-9]+\.sock$|^@(phos-softgpu|phos-ipc|cuda-uvmfd)-")
"""The unix sockets of the hook and of the GPU's driver: nobody calls the program there."""


@dataclass(frozen=True)
class Doors:
    """The sockets on which a program listens, as duplicates; and the inodes of the connections that
    it has accepted, by a process in whose network namespace they are.
    """

    listening: tuple[socket.socket, ...]
    accepted: Mapping[int, frozenset[int]]

    @property
    def is_called(self) -> bool:
        """Whether somebody waits to be accepted, something to be read, or somebody for an answer to
        what was read.
        """
        poller = select.poll()
        for each in self.listening:
            poller.register(each, select.POLLIN)
        return bool(poller.poll(0)) or self.is_sent_to or self.is_answering

    @property
    def is_answering(self) -> bool:
        """Whether something was read from a connection lately, and nothing was sent since."""
        return any(
            inodes and _shares_our_network(pid) and unanswered(inodes)
            for pid, inodes in self.accepted.items()
        )

    @property
    def is_sent_to(self) -> bool:
        """Whether something waits to be read on an accepted connection."""
        return any(inodes and _unread(pid, inodes) for pid, inodes in self.accepted.items())

    def close(self) -> None:
        """Close the duplicates."""
        for each in self.listening:
            unix_sockets.abandon(each.detach())


def is_answering(pids: Iterable[int]) -> bool:
    """Return whether one of these processes has read something that it has not answered yet, on a
    TCP connection that it has accepted in phosd's own network; others are not known.
    """
    found = {network.witness: network.accepted() for network in _networks(pids)}
    return Doors((), found).is_answering


def places(pids: Iterable[int]) -> list[str]:
    """Return where these processes listen, in words: ``127.0.0.1:8000``, ``/run/chat.sock``. There
    are at most :data:`MOST`. Raises :class:`Unsupported` if they are too many.
    """
    found: dict[int, str] = {}
    for network in _networks(pids):
        listening = network.listening()
        found |= {inode: listening[inode] for inode in network.holders if inode in listening}
    return sorted({*found.values()})[:MOST]


def places_of(process: ProcessId) -> list[str]:
    """Return where a process, and those below it, listen, as :func:`places` does."""
    return places(with_those_below([process]))


def open_doors(pids: Collection[int]) -> Doors:
    """Open the doors of these processes, which stand still. Those that have ended have none.

    Raises :class:`Unsupported` if they are too many.
    """
    doors: list[socket.socket] = []
    accepted: dict[int, frozenset[int]] = {}
    try:
        for network in _networks(pids):
            for inode in network.listening().keys() & network.holders.keys():
                if len(doors) == MOST:
                    raise Unsupported(
                        f"process {network.witness} listens on more than {counted(MOST, 'socket')}",
                        hint="nobody is waited for on so many; wake it with `phos resume`",
                        reason=Reason.TOO_LARGE,
                    )
                if (found := _duplicate(*network.holders[inode], inode)) is not None:
                    doors.append(found)
            accepted[network.witness] = network.accepted()
    except BaseException:
        Doors(tuple(doors), {}).close()
        raise
    return Doors(tuple(doors), accepted)


@dataclass(frozen=True)
class _Network:
    """The processes of a program in one network namespace, by one of them, the ``witness``.
    ``holders`` has their sockets by inode, each with a process and its descriptor.
    """

    witness: int
    holders: dict[int, tuple[int, int]]

    def listening(self) -> dict[int, str]:
        """Return the inodes of what seems to listen there, each with its place. Whoever binds a
        unix socket writes its name, which may look like another row.
        """
        found = {
            each.inode: _address(each)
            for each in _tcp_of(self.witness)
            if each.state == State.LISTENING
        }
        rows = b""
        with _ended():
            rows = (procfs.PROC / str(self.witness) / "net/unix").read_bytes()
        for row in rows.split(b"\n"):
            match = _ROW.fullmatch(row)
            if match and int(match[1], 16) & _ACCEPTS and not _OURS.search(match[3]):
                found[int(match[2])] = os.fsdecode(match[3]) or "a unix socket"
        return found

    def accepted(self) -> frozenset[int]:
        """Return the inodes of the TCP connections that they have accepted from others."""
        own = [each for each in _tcp_of(self.witness) if each.inode in self.holders]
        ports = {each.here[1] for each in own if each.state == State.LISTENING}
        ends = {each.here for each in own}
        return frozenset(
            each.inode
            for each in own
            if each.connected and each.here[1] in ports and each.there not in ends
        )


def _networks(pids: Iterable[int]) -> Iterator[_Network]:
    """Yield the networks of processes. Raises :class:`Unsupported` if they are too many."""
    found: dict[str, _Network] = {}
    for count, pid in enumerate(pids):
        if count == MOST_PROCESSES:
            raise Unsupported(
                f"process {pid} is one of more than {MOST_PROCESSES:,} of its program",
                hint="phosd does not look for the sockets of so many: neither `wake` nor `idle`, "
                "and nobody is told where they listen",
                reason=Reason.TOO_LARGE,
            )
        with _ended():
            name = procfs.namespace(pid, "net")
            network = found.setdefault(name, _Network(pid, {}))
            for number, inode in _sockets_of(pid):
                network.holders.setdefault(inode, (pid, number))
    yield from found.values()


def _address(listening: TcpSocket) -> str:
    host, port = listening.here
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tcp_of(pid: int) -> list[TcpSocket]:
    with _ended():
        return tcp_sockets(pid)
    return []


def _unread(pid: int, inodes: frozenset[int]) -> bool:
    with _ended():
        return unread(pid, inodes)
    return False


def _shares_our_network(pid: int) -> bool:
    with _ended():
        return procfs.namespace(pid, "net") == procfs.namespace(os.getpid(), "net")
    return False


def _sockets_of(pid: int) -> Iterator[tuple[int, int]]:
    """Yield a process's sockets: the number of the descriptor, and the inode."""
    with os.scandir(procfs.PROC / str(pid) / "fd") as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # it is closed by now
                target = os.readlink(entry.path)  # noqa: PTH115
                if target.startswith("socket:["):
                    yield int(entry.name), int(target[8:-1])


def _duplicate(pid: int, number: int, inode: int) -> socket.socket | None:
    """Return a duplicate of a socket that listens; None if it does not, or is gone."""
    try:
        descriptor = duplicate(pid, number)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISSOCK(status.st_mode) or status.st_ino != inode:
        unix_sockets.abandon(descriptor)
        return None
    found = socket.socket(fileno=descriptor)
    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        unix_sockets.abandon(found.detach())
        return None
    return found


@contextlib.contextmanager
def _ended() -> Iterator[None]:
    """Leave out a process that has ended, or its network."""
    try:
        yield
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.EINVAL):
            raise
