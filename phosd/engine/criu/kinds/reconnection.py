"""Make the TCP connections of a saved tree again, for CRIU to inherit.

They are made as any program makes them: one end listens for a moment, the other connects, and what
had arrived at one end is sent by the other. They are complete before any process of the user has
them, and nothing that needs rights is done to them from then on.
"""

import contextlib
import errno
import os
import socket
import time
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from phosd.engine.criu.images.connection_record import (
    OPTIONS,
    SO_RCVBUFFORCE,
    SO_SNDBUFFORCE,
    UNREAD,
    first_port,
)
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.image.cpu_manifest import Connection, ConnectionEnd
from phosd.engine.system import tcp
from phosd.errors import Busy, Reason, Unsupported

_TIMEOUT = 5.0
"""Seconds that an address may be taken: after its program's end the kernel keeps it for a while."""
_TAKEN = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
_TCP_REPAIR = 19
_REUSE = [(socket.SOL_SOCKET, each) for each in (socket.SO_REUSEADDR, socket.SO_REUSEPORT)]
_BUFFERS = [(socket.SOL_SOCKET, each) for each in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
_AT_ONCE = [option for option in OPTIONS if option not in _REUSE]

Ends = tuple[socket.socket, socket.socket]


class TcpReconnection(CriuPart):
    """The connections of a tree, made in its context for ``owner``.

    Making them raises :class:`Busy` if an address is taken, and :class:`Unsupported` if it does not
    exist here, or is not for users.
    """

    def __init__(self, made: tuple[Connection, ...], folder: Path, owner: Owner) -> None:
        self._wanted = made
        self._folder = folder
        self._owner = owner
        self._made: list[tuple[ConnectionEnd, socket.socket]] = []
        self._stack = contextlib.ExitStack()

    @property
    def descriptors(self) -> Sequence[int]:
        return [end.fileno() for _, end in self._made]

    @property
    def words(self) -> Sequence[str]:
        return [
            word
            for saved, end in self._made
            for word in ("--inherit-fd", f"fd[{end.fileno()}]:socket:[{saved.inode}]")
        ]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            unread = _unread(self._wanted, self._folder)
            for connection in self._wanted:
                _require_possible(connection)
                ends = _connected(connection)
                for end in ends:
                    stack.enter_context(end)
                try:
                    self._fill(connection, ends, unread)
                except OSError as error:
                    raise _not_here(connection, error) from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def held(self) -> None:
        """Give the sockets what they lacked so that CRIU could bind others beside them."""
        for saved, end in self._made:
            _set(end, saved, _REUSE)

    def _fill(self, connection: Connection, ends: Ends, unread: Iterator[bytes]) -> None:
        arrived = [next(unread) for _ in ends]
        for receiver, sender, data in zip(ends, reversed(ends), arrived, strict=True):
            _send(sender, receiver, data)
        for saved, end in zip(connection.ends, ends, strict=True):
            if saved.inode == 0:
                end.close()
                continue
            if saved.finished:
                end.shutdown(socket.SHUT_WR)
            if saved.deaf:
                end.shutdown(socket.SHUT_RD)
            _set(end, saved, _AT_ONCE)
            os.fchown(end.fileno(), self._owner.uid, self._owner.gid)
            end.setblocking(not saved.flags & os.O_NONBLOCK)
            self._made.append((saved, end))


def _unread(wanted: tuple[Connection, ...], folder: Path) -> Iterator[bytes]:
    ends = [end for connection in wanted for end in connection.ends]
    if not any(end.unread for end in ends):
        return iter([b""] * len(ends))
    data = (folder / UNREAD).read_bytes()
    found, at = [], 0
    for end in ends:
        found.append(data[at : at + end.unread])
        at += end.unread
    return iter(found)


def _require_possible(connection: Connection) -> None:
    """Require that these addresses exist here, and that a user may have the ports."""
    for end in connection.ends:
        try:
            with _socket(end.family) as any_port:
                any_port.bind((end.address[0], 0, *end.address[2:]))
        except OSError as error:
            raise _not_here(connection, error) from error
    first = first_port()
    if min(int(end.address[1]) for end in connection.ends) < first:
        raise Unsupported(
            f"{_shown(connection)}, a TCP connection of the program, has a port that only root may "
            "use here",
            hint=f"users may use those from {first} (net.ipv4.ip_unprivileged_port_start)",
            reason=Reason.TCP_CONNECTION,
        )


def _connected(connection: Connection) -> Ends:
    one, other = connection.ends
    end = time.monotonic() + _TIMEOUT
    while True:
        try:
            return _pair(one, other)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise _not_here(connection, error) from error
        try:
            there, here = _pair(other, one)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise _not_here(connection, error) from error
            if time.monotonic() > end:
                raise Busy(
                    f"{_shown(connection)}, a TCP connection of the program: {error.strerror}",
                    hint="end what uses these ports (`ss -tanp`), or wait a minute, and try again",
                ) from error
        else:
            return here, there
        time.sleep(0.1)


def _not_here(connection: Connection, error: OSError) -> Unsupported:
    return Unsupported(
        f"{_shown(connection)}, a TCP connection of the program, cannot be made: {error}",
        hint="restore it where these addresses are, and connections between them are allowed",
        reason=Reason.TCP_CONNECTION,
    )


def _shown(connection: Connection) -> str:
    return " to ".join(f"{end.address[0]}:{end.address[1]}" for end in connection.ends)


def _pair(listening: ConnectionEnd, connecting: ConnectionEnd) -> Ends:
    """Connect two sockets, of which the first listens. Raises :class:`OSError`."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(_socket(listening.family))
        listener.bind(tuple(listening.address))
        listener.listen()
        client = _socket(connecting.family)
        failed = opened.enter_context(contextlib.ExitStack())
        failed.callback(client.close)
        _bind(client, connecting)
        client.connect(_seen_from(connecting.family, listening.address))
        here = tcp.place(*client.getsockname()[:2])
        while True:
            accepted, there = listener.accept()
            if tcp.place(*there[:2]) == here:
                break
            accepted.close()  # somebody else has connected at this moment
        failed.pop_all()
        for end in (accepted, client):
            end.settimeout(_TIMEOUT)
        return accepted, client


def _socket(family: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.settimeout(_TIMEOUT)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made


def _bind(end: socket.socket, saved: ConnectionEnd) -> None:
    """Bind a socket that will connect.

    For a minute after its end a connection may keep its port from everybody (TIME_WAIT). A socket
    in repair mode may take such a port; nobody but us has this one. It must not take one at which
    somebody listens: its user could keep them from listening there again.
    """
    try:
        end.bind(tuple(saved.address))
    except OSError as error:
        if error.errno != errno.EADDRINUSE or _listened_at(int(saved.address[1])):
            raise
        end.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
        end.bind(tuple(saved.address))
        end.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _listened_at(port: int) -> bool:
    known = tcp.tcp_sockets(os.getpid())
    return any(each.state == tcp.State.LISTENING and each.here[1] == port for each in known)


def _seen_from(family: int, address: tuple[str | int, ...]) -> tuple[Any, ...]:
    """Return an address as a socket of ``family`` has to be told it."""
    host, port = tcp.place(str(address[0]), int(address[1]))
    if family == socket.AF_INET:
        return host, port
    return (f"::ffff:{host}", port) if ":" not in host else tuple(address)


def _send(sender: socket.socket, receiver: socket.socket, data: bytes) -> None:
    if data:
        room = 4 * len(data) + (1 << 16)
        sender.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, room)
        receiver.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, room)
        sender.sendall(data)


def _set(end: socket.socket, saved: ConnectionEnd, wanted: Container[tuple[int, int]]) -> None:
    """Set those of the saved options that are ``wanted``, by level and number."""
    for option in saved.options:
        key = (option.level, option.number)
        if key not in wanted:
            continue
        value = bytes.fromhex(option.value)
        if key in _BUFFERS:
            # The kernel doubles it.
            value = (int.from_bytes(value, "little") // 2).to_bytes(4, "little")
        end.setsockopt(*key, value)
