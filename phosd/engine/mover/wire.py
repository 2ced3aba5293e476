"""The protocol between the engine and a data mover: msgpack over two unix sockets.

A client begins with :class:`Attach`. The engine's brings the end of a socket pair: the connection
is for requests that move data, the pair for those that are answered at once, also while data move:
:class:`Adopt`, :class:`Create`, :class:`Drop`, :class:`FreeMemory`, :class:`Reserve`, and all that
concerns what is parked. The mover answers with :class:`Done` on both when it is ready. A visitor,
which brings no key, may only ask for what is parked, and let go of it.

A frame is a header (payload bytes, descriptors, sequence number; 32 bits each, little-endian), then
one byte with up to 200 descriptors attached for each batch of them, then the payload. The engine
sends one request at a time and numbers it; the mover answers with any number of :class:`Moved` and
then one other reply of the same number. :class:`Cancel` may follow a request at any time. A drain
may also send :class:`Dropped`, which the engine answers with :class:`Settled`.
"""

import array
import contextlib
import os
import select
import socket
import struct

import msgspec

from phosd.engine.errors import Internal, Timeout
from phosd.engine.image.manifest import ChunkRef

_HEADER = struct.Struct("<III")
_CREDENTIALS = struct.Struct("3i")
_BATCH = 200
"""Descriptors a message; the kernel takes 253."""
_MAX_PAYLOAD = 1 << 30
_PART_SECONDS = 60.0
"""How long the rest of a frame may take once it has begun."""


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """Base of all messages."""


class Attach(Message, frozen=True):
    """The first message. ``key`` is that of the store whose digests are wanted; empty: a visitor.

    The engine's carries a descriptor, the mover's end of the second connection.
    """

    key: bytes


class Leave(Message, frozen=True):
    """The engine needs the mover no more; :class:`Farewell` says what it does then."""


class Guard(Message, frozen=True):
    """Blocks are about to be parked, and must outlive the engine: (pid, start time, block id, key).

    They stay until :class:`Unguard`, until they are dropped, or until their process has ended.
    """

    blocks: list[tuple[int, int, int, int]]


class Unguard(Message, frozen=True):
    """Nothing of these processes is parked any more: (pid, start time)."""

    processes: list[tuple[int, int]]


class ListParked(Message, frozen=True):
    """Ask for what is guarded; the reply carries one descriptor a block."""


class Adopt(Message, frozen=True):
    """Import and map blocks; one descriptor comes with each. ``blocks``: (key, size in bytes)."""

    blocks: list[tuple[int, int]]


class Create(Message, frozen=True):
    """Make and map new blocks; the reply carries one descriptor each."""

    blocks: list[tuple[int, int]]


class Drop(Message, frozen=True):
    """Unmap and release blocks."""

    keys: list[int]


class Digest(Message, frozen=True):
    """Hash every chunk of some blocks."""

    keys: list[int]


class Packs(msgspec.Struct, array_like=True, frozen=True):
    """Packs of an image to write to: (number, capacity in bytes); their descriptors come along."""

    packs: list[tuple[int, int]]
    image: str
    owner: int


class Save(Message, frozen=True):
    """Copy blocks into packs.

    ``blocks``: (key, digests of the stop, 16 bytes a chunk); ``known``: chunks that the image
    already has.
    """

    blocks: list[tuple[int, bytes]]
    target: Packs
    known: list[ChunkRef]


class DrainedBlock(msgspec.Struct, array_like=True, frozen=True):
    """A block of a board: one byte in ``wanted`` and 16 in ``digests`` a chunk.

    ``order``: 32 bits a chunk, low numbers are saved first, 0 is unknown; or empty.
    """

    key: int
    first_chunk: int
    digests: bytes
    wanted: bytes
    order: bytes


class DrainedBoard(msgspec.Struct, array_like=True, frozen=True):
    """A program's board: what it has on this GPU, which it calls ``device``.

    ``slabs`` are blocks for shadows, whose slots are counted from ``first_slot``.
    """

    device: int
    blocks: list[DrainedBlock]
    slabs: list[int]
    first_slot: int


class Drain(Message, frozen=True):
    """Save blocks whose programs run; the descriptors of the boards come before the packs'.

    ``audit``: also count the shadows that were not needed. ``patience``: seconds without anything
    else to do after which a shadow that is still being made is given up.
    """

    boards: list[DrainedBoard]
    target: Packs
    audit: bool
    patience: float


class Settled(Message, frozen=True):
    """The engine has let go of what :class:`Dropped` named; follows a :class:`Drain`."""


class Copy(Message, frozen=True):
    """Copy chunks as they are: (key, index, pack as a place in ``target``, offset of the record).

    A negative pack asks for a new record, behind the ``used`` bytes of some pack.
    """

    chunks: list[tuple[int, int, int, int]]
    target: Packs
    used: list[int]


class Pin(Message, frozen=True):
    """Make packs, whose descriptors come with it, ready to be written to by the device."""


class Unpin(Message, frozen=True):
    """Let go of the packs that were pinned."""


class Load(Message, frozen=True):
    """Fill blocks from packs, whose descriptors come with it, and hash them."""

    blocks: list[tuple[int, list[ChunkRef]]]
    packs: list[int]


class FreeMemory(Message, frozen=True):
    """Ask for the device's memory."""


class Reserve(Message, frozen=True):
    """Keep ``byte_count`` of device memory for ``processes`` (pid, start time); 0 lets go of it.

    It outlives the engine as long as one of them lives.
    """

    byte_count: int
    processes: list[tuple[int, int]]


class Cancel(Message, frozen=True):
    """Give up the request of the same sequence number."""


class Done(Message, frozen=True):
    """The request was carried out."""


class Failed(Message, frozen=True):
    """The request failed; ``code`` is the name of a class in errors.py."""

    code: str
    what: str
    hint: str


class Moved(Message, frozen=True):
    """``byte_count`` more bytes of the running request are done."""

    byte_count: int


class Digests(Message, frozen=True):
    """(key, 16 bytes a chunk)."""

    blocks: list[tuple[int, bytes]]


class Stored(Message, frozen=True):
    """Where the chunks are, and which (key, index) no longer were what was hashed at the stop."""

    blocks: list[tuple[int, list[ChunkRef]]]
    changed: list[tuple[int, int]]


class Copied(Message, frozen=True):
    """In the order of the request: (pack, offset, length) of each chunk; 16 bytes of digest."""

    places: list[tuple[int, int, int]]
    digests: bytes


class Dropped(Message, frozen=True):
    """Blocks that a drain has dropped because their program needs the memory."""

    keys: list[int]


class Drained(Message, frozen=True):
    """The end of a drain; see :class:`phosd.engine.mover.client.Drained`.

    ``blocks``: where each chunk is that was wanted.
    """

    blocks: list[tuple[int, list[ChunkRef | None]]]
    changed: list[tuple[int, int]]
    from_slots: int
    byte_count: int
    seconds_to_saved: float
    longest_to_saved: float
    aborted_for_memory: bool
    dropped: list[int]
    needless_shadows: int | None


class Memory(Message, frozen=True):
    """Device memory in bytes."""

    free: int
    total: int


class Parked(Message, frozen=True):
    """What is guarded: (pid, start time, block id); one descriptor comes with each.

    ``room``: the processes for which room is kept: (pid, start time).
    """

    blocks: list[tuple[int, int, int]]
    room: list[tuple[int, int]]


class Farewell(Message, frozen=True):
    """Whether the mover stays, because something of a process is parked, or ends."""

    stays: bool


Request = (
    Attach
    | Leave
    | Guard
    | Unguard
    | ListParked
    | Adopt
    | Create
    | Drop
    | Digest
    | Save
    | Drain
    | Copy
    | Settled
    | Pin
    | Unpin
    | Load
    | FreeMemory
    | Reserve
    | Cancel
)
Reply = (
    Done
    | Failed
    | Moved
    | Digests
    | Stored
    | Copied
    | Dropped
    | Drained
    | Memory
    | Parked
    | Farewell
)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Request | Reply] = msgspec.msgpack.Decoder(Request | Reply)


class PeerGone(Internal):
    """The other end of the connection has closed it or died."""


class Connection:
    """One end of a unix socket. Sending and receiving may happen on different threads."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the peer then sees :class:`PeerGone`."""
        self._socket.close()

    def shut_down(self) -> None:
        """End the connection, also for a thread of ours that waits for a message."""
        with contextlib.suppress(OSError):  # the peer has ended it
            self._socket.shutdown(socket.SHUT_RDWR)

    def peer(self) -> tuple[int, int]:
        """(pid, effective user id) of who made the other end."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return pid, uid

    def send(self, sequence: int, message: Message, descriptors: "list[int] | None" = None) -> None:
        """Send a frame. The descriptors stay open here. Raises :class:`PeerGone`."""
        fds = descriptors or []
        payload = _encoder.encode(message)
        try:
            self._socket.sendall(_HEADER.pack(len(payload), len(fds), sequence))
            for at in range(0, len(fds), _BATCH):
                socket.send_fds(self._socket, [b"\0"], fds[at : at + _BATCH])
            self._socket.sendall(payload)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGone(f"the data mover's connection is lost ({error.strerror})") from error

    def receive(self, seconds: float | None) -> "tuple[int, Request | Reply, list[int]] | None":
        """The next frame as (sequence, message, descriptors); None when none begins in time.

        Raises :class:`PeerGone`, and :class:`Timeout` when a frame stops in its middle.
        """
        if not self._readable(seconds):
            return None
        size, count, sequence = _HEADER.unpack(self._exactly(_HEADER.size))
        if size > _MAX_PAYLOAD:
            raise Internal(f"the data mover's peer announced a message of {size} bytes")
        descriptors: list[int] = []
        try:
            while len(descriptors) < count:
                descriptors += self._descriptors()
            return sequence, _decoder.decode(self._exactly(size)), descriptors
        except BaseException:
            for fd in descriptors:
                os.close(fd)
            raise

    def _descriptors(self) -> list[int]:
        self._await_part()
        room = socket.CMSG_SPACE(_BATCH * array.array("i").itemsize)
        flags = socket.MSG_CMSG_CLOEXEC
        data, ancillary, answer, _ = self._socket.recvmsg(1, room, flags)
        if not data:
            raise PeerGone("the data mover's connection ended")
        fds = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) // fds.itemsize * fds.itemsize])
        if answer & socket.MSG_CTRUNC or not fds:
            for fd in fds:
                os.close(fd)
            raise Internal(
                "descriptors of device memory did not arrive",
                hint="raise the limit of open files (LimitNOFILE) to 65536",
            )
        return fds.tolist()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            self._await_part()
            try:
                count = self._socket.recv_into(view)
            except ConnectionResetError:
                count = 0
            if not count:
                raise PeerGone("the data mover's connection ended")
            view = view[count:]
        return data

    def _await_part(self) -> None:
        if not self._readable(_PART_SECONDS):
            raise Timeout("a message of the data mover stopped in its middle", hint="try again")

    def _readable(self, seconds: float | None) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(None if seconds is None else seconds * 1000))
