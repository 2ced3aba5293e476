"""Find the doors of a program: the sockets on which it listens, by which others call it.

A program that is frozen accepts nothing, and the kernel goes on for it: whoever connects waits in
the queue of the socket that listens, which becomes readable, and what is sent on a connection that
was accepted before waits to be read. So whether somebody calls is seen from outside, in a duplicate
of that socket, and without taking anything away.

Connections are not duplicated: to close the last descriptor of one may take as long as its program
has chosen (``SO_LINGER``).
"""

import contextlib
import os
import re
import socket
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from phosd.engine.system import procfs
from phosd.engine.system.foreign_descriptor import duplicate
from phosd.engine.system.tcp import State, TcpSocket, tcp_sockets
from phosd.errors import Unsupported
from phosd.units import counted

MOST = 256
"""Sockets on which one program may listen."""
_ACCEPTS = 0x10000
"""The flag of a unix socket that listens, in ``/proc/net/unix``."""
_OURS = re.compile(r"/hook/([0-9]+/)?[0-9]+\.sock$|^@(phos-softgpu|phos-ipc|cuda-uvmfd)-")
"""The unix sockets of the hook and of the GPU's driver: nobody calls the program there."""


@dataclass(frozen=True)
class Doors:
    """The sockets on which a program listens, as duplicates; and the inodes of the connections that
    it has accepted, by a process in whose network namespace they are.
    """

    listening: tuple[socket.socket, ...]
    accepted: Mapping[int, frozenset[int]]

    @property
    def is_sent_to(self) -> bool:
        """Whether something waits to be read on an accepted connection."""
        return any(
            each.unread and each.inode in inodes
            for pid, inodes in self.accepted.items()
            if inodes
            for each in _tcp_of(pid)
        )

    def close(self) -> None:
        """Close the duplicates."""
        for each in self.listening:
            each.close()


def places(pids: Iterable[int]) -> list[str]:
    """Return where these processes listen, in words: ``127.0.0.1:8000``, ``/run/chat.sock``."""
    found: dict[int, str] = {}
    for pid in pids:
        with _ended():
            listening = _listening(pid)
            found |= {i: listening[i] for i in _sockets_of(pid).values() if i in listening}
    return sorted({*found.values()})


def open_doors(pids: Collection[int]) -> Doors:
    """Open the doors of these processes, which stand still. Those that have ended have none.

    Raises :class:`Unsupported` if they are too many.
    """
    with contextlib.ExitStack() as opened:
        doors: dict[int, socket.socket] = {}
        for pid, number, inode in _listened_on(pids):
            if inode in doors:
                continue
            if len(doors) == MOST:
                raise Unsupported(
                    f"process {pid} listens on more than {counted(MOST, 'socket')}",
                    hint="nobody is waited for on so many; wake it with `phos resume`",
                )
            found = _duplicate(pid, number, inode)
            if found is not None:
                doors[inode] = opened.enter_context(found)
        accepted = {pid: _accepted(pid, pids) for pid in _one_for_each_network(pids)}
        opened.pop_all()
        return Doors(tuple(doors.values()), accepted)


def _listened_on(pids: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Yield where a process listens: its pid, the number of the descriptor, and the inode."""
    for pid in pids:
        with _ended():
            listening = _listening(pid)
            for number, inode in _sockets_of(pid).items():
                if inode in listening:
                    yield pid, number, inode


def _listening(pid: int) -> dict[int, str]:
    """Return the inodes of what listens in the network of ``pid``, each with its place."""
    found = {
        each.inode: _address(each) for each in tcp_sockets(pid) if each.state == State.LISTENING
    }
    rows = (procfs.PROC / str(pid) / "net/unix").read_text(errors="surrogateescape")
    for row in rows.splitlines()[1:]:
        fields = row.split(maxsplit=7)
        name = fields[7] if len(fields) > 7 else "a unix socket"
        if int(fields[3], 16) & _ACCEPTS and not _OURS.search(name):
            found[int(fields[6])] = name
    return found


def _address(listening: TcpSocket) -> str:
    host, port = listening.here
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _accepted(witness: int, pids: Iterable[int]) -> frozenset[int]:
    """Return the inodes of the TCP connections that these processes have accepted from others, in
    the network of ``witness``.
    """
    ours: set[int] = set()
    for pid in pids:
        with _ended():
            ours |= {*_sockets_of(pid).values()}
    own = [each for each in _tcp_of(witness) if each.inode in ours]
    ports = {each.here[1] for each in own if each.state == State.LISTENING}
    ends = {each.here for each in own}
    return frozenset(
        each.inode
        for each in own
        if each.connected and each.here[1] in ports and each.there not in ends
    )


def _one_for_each_network(pids: Iterable[int]) -> Iterator[int]:
    seen: set[str] = set()
    for pid in pids:
        with _ended():
            network = procfs.namespace(pid, "net")
            if network not in seen:
                seen.add(network)
                yield pid


def _tcp_of(pid: int) -> list[TcpSocket]:
    with _ended():
        return tcp_sockets(pid)
    return []


def _sockets_of(pid: int) -> dict[int, int]:
    """Return the inodes of a process's sockets, by the numbers of their descriptors."""
    found: dict[int, int] = {}
    with os.scandir(procfs.PROC / str(pid) / "fd") as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # it is closed by now
                target = os.readlink(entry.path)  # noqa: PTH115
                if target.startswith("socket:["):
                    found[int(entry.name)] = int(target[8:-1])
    return found


def _duplicate(pid: int, number: int, inode: int) -> socket.socket | None:
    """Return a duplicate of a socket that listens; None if it is another file by now."""
    try:
        descriptor = duplicate(pid, number)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISSOCK(status.st_mode) or status.st_ino != inode:
        os.close(descriptor)
        return None
    return socket.socket(fileno=descriptor)


def _ended() -> contextlib.suppress:
    """Leave out a process that has ended."""
    return contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError)
