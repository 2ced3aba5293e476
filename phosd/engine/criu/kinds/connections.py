"""TCP connections of which a tree has both ends: found, saved, and cut out of CRIU's images.

CRIU saves a connection in the kernel's repair mode. In that mode a socket may take any port and any
peer, and whoever shares the socket with CRIU may do that too: the user's other processes, or a
task of the tree in which the user's code runs. So CRIU is told to close connections. What has
arrived at either end is looked at here, while the tree stands still, in copies of its descriptors;
in the images the sockets become unix sockets that a restore inherits
(:mod:`phosd.engine.criu.kinds.reconnection`).
"""

import contextlib
import errno
import fcntl
import select
import socket
import struct
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from phosd.engine.criu.files.tcp_pairs import Found, find
from phosd.engine.criu.images.connection_record import (
    MOST_UNREAD,
    OPTIONS,
    SO_BUF_LOCK,
    SO_RCVBUFFORCE,
    UNREAD,
    USERS_PRIORITIES,
)
from phosd.engine.criu.images.fields import FdinfoEntry, FdTypes, FileEntry, InetSkEntry
from phosd.engine.criu.images.image_file import Field, fields, message, rewrite
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.image.cpu_manifest import Connection, ConnectionEnd, CpuDetails, SocketOption
from phosd.engine.image.private_files import write_durably
from phosd.engine.system import procfs
from phosd.engine.system.foreign_descriptor import duplicate
from phosd.engine.system.procfs import Descriptor
from phosd.engine.system.tcp import State, TcpSocket, tcp_sockets
from phosd.errors import Busy, Reason, Unsupported
from phosd.units import human_bytes

_SO_PEEK_OFF = 42
"""``asm-generic/socket.h``"""
_TCP_ULP = 31
_NO_PEEK_OFFSET = -1
_UNSENT, _WAITING = 0x5411, 0x541B
"""``SIOCOUTQ`` (bytes that the peer has not acknowledged) and ``SIOCINQ``."""
_SETTLING_SECONDS = 2.0


@dataclass(frozen=True)
class Saved:
    """Connections, and what had arrived at their ends."""

    connections: tuple[Connection, ...] = ()
    unread: tuple[bytes, ...] = ()

    @property
    def inodes(self) -> frozenset[int]:
        return frozenset(end.inode for each in self.connections for end in each.ends if end.inode)


class Connections(CriuPart):
    """Saves the connections of a tree, and cuts them out of CRIU's images in ``folder``.

    ``close_others``: a restore closes those that lead outside.
    """

    def __init__(self, folder: Path, *, close_others: bool) -> None:
        self._folder = folder
        self._close_others = close_others
        self._saved = Saved()

    def frozen(self, tree: TreeResources) -> None:
        self._saved = save(find(tree.descriptors), tree.descriptors)

    def record(self, details: CpuDetails) -> CpuDetails:
        return replace(details, connections=self._saved.connections)

    def complete(self) -> None:
        cut_out(self._folder, self._saved.inodes, close_others=self._close_others)
        if any(self._saved.unread):
            write_durably(self._folder / UNREAD, b"".join(self._saved.unread))


def save(found: Found, descriptors: Iterable[Descriptor]) -> Saved:
    """Look at the ends of the connections of a tree that stands still.

    Raises :class:`Unsupported` for what could not be given back, and :class:`Busy` if a connection
    does not come to rest.
    """
    if not found.within:
        return Saved()
    holders = {each.file.st_ino: each for each in descriptors}
    connections, unread = [], []
    with contextlib.ExitStack() as stack:

        def opened(end: TcpSocket) -> socket.socket:
            return stack.enter_context(_duplicate(holders[end.inode]))

        pairs = [tuple(opened(end) if end else None for end in pair) for pair in found.within]
        for one, other in pairs:
            if one and other:
                _settle(one, other)
                _settle(other, one)
        states = {
            each.inode: each.state for each in tcp_sockets(holders[found.within[0][0].inode].pid)
        }
        for pair, sockets in zip(found.within, pairs, strict=True):
            ends = []
            for end, opened_end in zip(pair, sockets, strict=True):
                if end is None or opened_end is None:
                    ends.append(_closed_end(sockets[0]))
                    unread.append(b"")
                    continue
                ends.append(_end(opened_end, holders[end.inode], states.get(end.inode, 0)))
                unread.append(_unread(opened_end, MOST_UNREAD - sum(map(len, unread))))
            connections.append(Connection((ends[0], ends[1])))
    return Saved(tuple(connections), tuple(unread))


def _duplicate(holder: Descriptor) -> socket.socket:
    try:
        return socket.socket(fileno=duplicate(holder.pid, holder.number))
    except OSError as error:
        if error.errno not in (errno.ESRCH, errno.EBADF):
            raise
        raise Busy(
            f"{procfs.describe(holder.pid)} ended while its TCP connections were looked at",
            hint="if the program goes on without it, try again",
        ) from error


def _closed_end(other: socket.socket | None) -> ConnectionEnd:
    assert other is not None
    return ConnectionEnd(0, other.family, other.getpeername())


def _end(end: socket.socket, holder: Descriptor, state: int) -> ConnectionEnd:
    name = f"descriptor {holder.number} of {procfs.describe(holder.pid)}"
    if state not in (State.ESTABLISHED, State.FINISHED, State.PEER_FINISHED):
        raise Busy(
            f"{name}, a TCP connection within the program, is being opened or closed",
            hint="the program goes on; try again",
        )
    for what, wrong in _strange(end):
        if wrong:
            raise Unsupported(
                f"{name}, a TCP connection within the program, {what}, which cannot be saved",
                hint="the program goes on; start it without that",
                reason=Reason.TCP_CONNECTION,
            )
    poller = select.poll()
    poller.register(end, select.POLLRDHUP)
    return ConnectionEnd(
        inode=holder.file.st_ino,
        family=end.family,
        address=end.getsockname(),
        flags=holder.flags,
        unread=_number(end, _WAITING),
        finished=state == State.FINISHED,
        deaf=state != State.PEER_FINISHED and bool(poller.poll(0)),
        options=tuple(
            SocketOption(*option, end.getsockopt(*option, size).hex())
            for option, size in OPTIONS.items()
        ),
    )


def _strange(end: socket.socket) -> Iterator[tuple[str, bool]]:
    """Yield what would be lost of a socket, and whether it has that."""
    yield "sends signals", fcntl.fcntl(end, fcntl.F_GETOWN) != 0
    yield "is encrypted by the kernel", bool(_upper_protocol(end))
    offset = end.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
    yield "has an offset for peeking", offset != _NO_PEEK_OFFSET
    yield "has a mark", end.getsockopt(socket.SOL_SOCKET, socket.SO_MARK) != 0
    priority = end.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)
    yield "has a priority that only root may set", priority not in USERS_PRIORITIES


def _upper_protocol(end: socket.socket) -> bytes:
    try:
        return end.getsockopt(socket.IPPROTO_TCP, _TCP_ULP, 16).rstrip(b"\0")
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        return b""


def _unread(end: socket.socket, most: int) -> bytes:
    waiting = _number(end, _WAITING)
    if waiting > most:
        raise Unsupported(
            f"more than {human_bytes(MOST_UNREAD)} wait in the TCP connections within the program",
            hint="the program goes on; try again when it has received more of them",
            reason=Reason.UNREAD_DATA,
        )
    found = end.recv(waiting, socket.MSG_PEEK | socket.MSG_DONTWAIT) if waiting else b""
    if len(found) != waiting:
        raise Unsupported(
            "urgent data wait in a TCP connection within the program",
            hint="the program goes on; try again when they have been received",
            reason=Reason.UNREAD_DATA,
        )
    return found


def _settle(sender: socket.socket, receiver: socket.socket) -> None:
    """Wait until all that was sent has arrived; if the receiver is full, make room.

    Only what has arrived can be looked at. Whoever looks at it has the receiver tell the sender how
    much room there is.
    """
    if not _number(sender, _UNSENT):
        return
    lock = receiver.getsockopt(socket.SOL_SOCKET, SO_BUF_LOCK)
    size = receiver.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    room = size + 4 * (_number(sender, _UNSENT) + _number(receiver, _WAITING))
    receiver.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, min(room, 1 << 30))
    end = time.monotonic() + _SETTLING_SECONDS
    try:
        while _number(sender, _UNSENT):
            with contextlib.suppress(BlockingIOError):
                receiver.recv(1 << 20, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            receiver.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            if time.monotonic() > end:
                raise Busy(
                    "a TCP connection within the program does not come to rest",
                    hint="the program goes on; try again",
                )
            time.sleep(0.002)
    finally:
        receiver.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, size // 2)  # it is doubled
        receiver.setsockopt(socket.SOL_SOCKET, SO_BUF_LOCK, lock)


def _number(end: socket.socket, request: int) -> int:
    found: int
    (found,) = struct.unpack("i", fcntl.ioctl(end, request, bytes(4)))
    return found


def cut_out(folder: Path, inodes: Collection[int], *, close_others: bool) -> None:
    """Change the images in ``folder`` so that they take these sockets from outside.

    Raises :class:`~phosd.errors.Internal` if they are not CRIU's, and :class:`Unsupported` if they
    have another connection, unless others are to be closed: no process has it open, it is on its
    way to one.
    """
    cut: set[int | bytes] = set()

    def file(found: list[Field]) -> Iterable[Field]:
        entry = _inet(found)
        if entry.get(InetSkEntry.PROTO) != socket.IPPROTO_TCP or not entry.get(
            InetSkEntry.DST_PORT
        ):
            return found
        if entry.get(InetSkEntry.INO) not in inodes:
            if close_others or entry.get(InetSkEntry.STATE) == State.CLOSED:
                return found
            raise Unsupported(
                "a connected TCP socket is on its way through a socket of the program, and cannot "
                "be saved",
                hint="the program goes on; try again when it has been received",
                reason=Reason.UNREAD_DATA,
            )
        number = {each.number: each.value for each in found}.get(FileEntry.ID, 0)
        cut.add(number)
        return (
            Field.of(FileEntry.TYPE, FdTypes.UNIXSK),
            Field.of(FileEntry.ID, number),
            Field.of(FileEntry.USK, message(_unix_entry(number, entry))),
        )

    def descriptor(found: list[Field]) -> Iterable[Field]:
        if {each.number: each.value for each in found}.get(FdinfoEntry.ID, 0) not in cut:
            return found
        kind = Field.of(FdinfoEntry.TYPE, FdTypes.UNIXSK)
        return [kind if each.number == FdinfoEntry.TYPE else each for each in found]

    rewrite(folder / "files.img", file)
    if cut:
        for path in folder.glob("fdinfo-*.img"):
            rewrite(path, descriptor)


def _inet(file: Iterable[Field]) -> dict[int, int | bytes]:
    """Return the fields of a file's entry as an internet socket; none if it is another file."""
    values = {each.number: each.value for each in file}
    entry = values.get(FileEntry.ISK)
    if values.get(FileEntry.TYPE) != FdTypes.INETSK or not isinstance(entry, bytes):
        return {}
    return {each.number: each.value for each in fields(entry)}


def _unix_entry(number: int | bytes, inet: dict[int, int | bytes]) -> Iterator[Field]:
    """Yield the fields of a unix socket without a peer, in the order of ``unix_sk_entry``."""
    plain = (
        number,
        inet[InetSkEntry.INO],
        socket.SOCK_STREAM,
        State.CLOSED,
        inet.get(InetSkEntry.FLAGS, 0),
        0,  # flags of CRIU's
        0,  # places for connections
        0,  # the peer
        inet.get(InetSkEntry.FOWN, b""),
        inet.get(InetSkEntry.OPTS, b""),
        b"",  # the name
    )
    for at, value in enumerate(plain, 1):
        yield Field.of(at, value)
