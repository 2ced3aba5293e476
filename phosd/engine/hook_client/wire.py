"""Encode and decode messages between phosd and the hook, and send them over a connection.

``phosd/hook/protocol/wire.h`` is the other side, with the same names for all layouts. Messages come
from programs of any user, so everything is checked before it is used.
"""

import array
import contextlib
import enum
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from phosd.engine.hook_client.received import without_files_of_others
from phosd.engine.system import standstill
from phosd.engine.system.cuda import gpu_uuid
from phosd.errors import (
    Busy,
    Internal,
    NoSuchProcess,
    OutOfMemory,
    PhosError,
    Reason,
    Timeout,
    Unsupported,
)

MAGIC = 0x534F4850
VERSION = 1
REPLY = 0x8000
MAX_PAYLOAD = 1 << 16
MAX_DESCRIPTORS = 128
_CONTROL_BYTES = socket.CMSG_SPACE(253 * 4)  # as many descriptors as one message may have
_IMPORTS, _MAKES = 1, 2  # wire.h's Memories
_SUSPECT = 1  # chunk_map.h's kSuspect
ANALYSED, GUESSED = 0x100, 0x200
"""Flags of launches; see wire.h."""
DEADLINE = 30.0
"""Seconds that one request may take. Unmapping 1,170 blocks took 27 ms on an H200."""

HEADER = struct.Struct("<IHHIIII")
HELLO = struct.Struct("<8I256s")
DEVICE_ID = struct.Struct("<16s")
BLOCK = struct.Struct("<QQQiI")
BLOCK_LIST = struct.Struct("<IIQQ")
CLOSE_GATE = struct.Struct("<III")
GATE_STATE = struct.Struct("<IIIIQQQ")
ARM = struct.Struct("<II")
ROW_LIST = struct.Struct("<II")
"""Before the rows of a list: how many there are, and whether there are more."""
KERNEL = struct.Struct("<QQII")
LAUNCHES_ASK = struct.Struct("<QII")
LAUNCHED_KERNEL = struct.Struct("<QQQQIIII")
IMAGE = struct.Struct("<QQQII")
EMPTY_CACHE = struct.Struct("<II")
RELEASE_STATE = struct.Struct("<II256s")
PROGRAM_ASK = struct.Struct("<IiIIQ256s")
PROGRAM_STATE = struct.Struct("<IIIIQ256s")
PROGRAM_WISH = struct.Struct("<QII")
MAX_NAME = 4096
MAX_KERNELS = 1 << 16
"""Most kernels accepted from one program."""
MAX_BLOCKS = 1 << 20
"""Most blocks accepted from one program; as many of 2 MiB would fill 2 TiB."""
MAX_EXPORTED = 1 << 17
"""Most blocks that one program may hand out; phosd keeps a descriptor of each. PyTorch makes some
4,200 of a GPU of 141 GB.
"""
U64 = struct.Struct("<Q")
"""A cursor or a count."""


class Type(enum.IntEnum):
    """Requests; see wire.h."""

    HELLO = 1
    LIST_BLOCKS = 2
    EXPORT_BLOCKS = 3
    CLOSE_GATE = 4
    PARK = 5
    UNPARK_BLOCKS = 6
    UNPARK = 7
    OPEN_GATE = 8
    REHOME = 9
    DETACH = 10
    STATS = 11
    ARM = 12
    DISARM = 13
    FORGET = 14
    KERNELS = 15
    EMPTY_CACHE = 16
    MAY_SEE = 17
    SEAL_GATE = 18
    PROGRAM = 19
    IMAGES = 20
    SUMMARIES = 21
    LAUNCHES = 22
    MAKE_BLOCKS = 23
    BLOCKS_FILLED = 24
    BLOCKS_RENEWED = 25


class Status(enum.IntEnum):
    """Results of a request; see wire.h."""

    OK = 0
    BAD_MESSAGE = 1
    WRONG_STATE = 2
    UNSUPPORTED = 3
    BUSY = 4
    DRIVER = 5
    OUT_OF_MEMORY = 6
    NOT_IMPORTABLE = 7


class HookState(enum.IntEnum):
    """States of the gate; see wire.h."""

    RUNNING = 0
    CLOSING = 1
    CLOSED = 2
    PARKED = 3


class Release(enum.IntEnum):
    """Results of emptying PyTorch's cache; see wire.h."""

    NONE = 0
    ASKED = 1
    RELEASED = 2
    NO_INTERPRETER = 3
    NO_TORCH = 4
    CAPTURING = 5
    FAILED = 6


class Ask(enum.IntEnum):
    """What is asked with ``PROGRAM``; see wire.h."""

    LOOK = 0
    WANT = 1
    ANSWER = 2
    PASS = 3


class ProgramOutcome(enum.IntEnum):
    """Outcomes of a program's wait; see phosd/include/phos.h."""

    FAILED = -1
    NOTHING = 0
    SAVED = 1
    RESTORED = 2
    STOPPED = 3
    WAITING = 4


THENS = ("run", "end", "hold")
"""What becomes of the program, by the number in phosd/include/phos.h."""


class BlockFlag(enum.IntFlag):
    """Properties of a block; see wire.h."""

    HAS_DESCRIPTOR = 1
    EXPORTED = 2
    IMPORTED = 4
    PROGRAM_VMM = 8
    HOST_LOCATED = 16
    AWAY = 32


@dataclass(frozen=True)
class Hello:
    """The hook's description of its process; ``devices`` are UUIDs in the process's order."""

    pid: int
    driver_version: int
    devices: tuple[str, ...]
    state: HookState
    parkable: bool
    ever_parked: bool
    """It has memory that was handed back to it, and is not its own."""
    uses_unsupported: bool
    never_stopped: bool
    """It was never parked or detached; an older hook does not say so."""
    reason: str
    code: str = ""
    """The reason for programs; an older hook does not say it."""
    makes_memory: bool = False
    """It is on a GPU that it did not see at first, for which the driver imports no memory: it is
    handed back in memory that the process makes.
    """


@dataclass(frozen=True)
class HookBlock:
    """A physical allocation; ``size`` in bytes, ``device`` as the process numbers it."""

    id: int
    va: int
    size: int
    device: int
    flags: BlockFlag


@dataclass(frozen=True)
class GateState:
    """The state of a gate that is closing."""

    settled: bool
    busy: bool
    waiting: int
    capturing: int
    admitted: int
    last_id: int
    freed: int


@dataclass(frozen=True)
class Kernel:
    """A kernel that was launched: its name, the hash of its module's image (0: unknown), the number
    of launches, and whether it was predicted to write all memory.
    """

    name: str
    module: int
    launches: int
    suspect: bool


@dataclass(frozen=True)
class LaunchedKernel:
    """A kernel that was launched, as :class:`Kernel`, with what its table says of it. Of so many
    launches it is known that they are ``idempotent``: run again, they would leave the same memory;
    of so many that they may be not, because what they read meets what they write. ``summary`` has
    the flags of its table (``analysis.table``), or None without one. ``guessed``: a launch was
    predicted otherwise than by its table.
    """

    name: str
    module: int
    launches: int
    idempotent: int
    overwrites: int
    suspect: bool
    guessed: bool
    summary: int | None

    @property
    def undecided(self) -> int:
        """Launches of which not all accesses are known."""
        return max(0, self.launches - self.idempotent - self.overwrites)


@dataclass(frozen=True)
class ReleaseState:
    """The state of emptying PyTorch's cache; ``reason`` says why it failed."""

    release: Release
    reason: str


@dataclass(frozen=True)
class ProgramState:
    """What a program says of its safe points: whether it has some, how many threads wait in the
    hook, the number of the checkpoint that they ask for (0: none), and whether, and why, a callable
    of the program's failed.
    """

    declared: bool
    waiting: int
    refused: bool
    wish: int
    reason: str


class NotImportable(Internal):
    """The driver does not import this memory for the process, which can make some."""

    code = Internal.__name__


_ERRORS: dict[int, tuple[type[PhosError], str]] = {
    Status.BAD_MESSAGE: (
        Internal,
        "the hook and phosd are of different versions; restart the program",
    ),
    Status.WRONG_STATE: (Busy, "another client may be at work on this process; try again"),
    Status.UNSUPPORTED: (Unsupported, "use mode driver, or start the program anew"),
    Status.BUSY: (Busy, "try again, or raise the deadline"),
    Status.DRIVER: (Internal, "see the driver's log (dmesg)"),
    Status.OUT_OF_MEMORY: (OutOfMemory, "free device memory and try again"),
    Status.NOT_IMPORTABLE: (NotImportable, "see the driver's log (dmesg)"),
}


_CODE = re.compile(rb"[a-z-]{1,32}")
"""Codes of a hook, which may be newer, or not be ours."""


class Garbled(Exception):
    """An answer violates the protocol; the text says how."""


def decode_hello(body: bytes) -> Hello:
    """Decode the answer to ``HELLO``. Raises :class:`Garbled`."""
    head, rows = body[: HELLO.size], body[HELLO.size :]
    pid, version, count, state, *said, reason = unpack(HELLO, head)
    if len(rows) != count * DEVICE_ID.size:
        raise Garbled(f"a hello of {len(body)} bytes for {count} devices")
    if state not in list(HookState):
        raise Garbled(f"a state that does not exist ({state})")
    text, _, rest = reason.partition(b"\0")
    code = rest.partition(b"\0")[0]
    where = HookState(state)
    devices = tuple(gpu_uuid(raw) for (raw,) in DEVICE_ID.iter_unpack(rows))
    parkable, memories, unsupported, never_stopped = said
    return Hello(
        pid,
        version,
        devices,
        where,
        bool(parkable),
        bool(memories & _IMPORTS),
        bool(unsupported),
        bool(never_stopped),
        printable(text),
        code.decode() if _CODE.fullmatch(code) else "",
        bool(memories & _MAKES),
    )


def decode_blocks(body: bytes, after: int) -> tuple[list[HookBlock], bool]:
    """Decode the answer to ``LIST_BLOCKS`` and ``EXPORT_BLOCKS``.

    Returns blocks with ascending ids above ``after``, and whether there are more. Raises
    :class:`Garbled`.
    """
    head, rows = body[: BLOCK_LIST.size], body[BLOCK_LIST.size :]
    count, more, _, _ = unpack(BLOCK_LIST, head)
    if len(rows) != count * BLOCK.size:
        raise Garbled(f"a block list of {len(body)} bytes for {count} blocks")
    fields = BLOCK.iter_unpack(rows)
    blocks = [
        HookBlock(i, va, size, device, BlockFlag(flags)) for i, va, size, device, flags in fields
    ]
    ids = [after, *(block.id for block in blocks)]
    if ids != sorted(set(ids)):  # otherwise asking for the next ones might never end
        raise Garbled("blocks that are not in order of their ids")
    return blocks, bool(more and blocks)


def decode_gate(body: bytes) -> GateState:
    """Decode the answer to ``CLOSE_GATE``. Raises :class:`Garbled`."""
    settled, busy, *rest = unpack(GATE_STATE, body)
    return GateState(bool(settled), bool(busy), *rest)


def decode_kernels(body: bytes) -> tuple[list[Kernel], bool]:
    """Decode the answer to ``KERNELS``, and whether there are more. Raises :class:`Garbled`."""
    rows, more = decode_rows(body, KERNEL, "kernels", "a kernel's name")
    return [
        Kernel(name, module, launches, bool(flags & _SUSPECT))
        for (module, launches, flags), name in rows
    ], more


def decode_launches(body: bytes) -> tuple[list[LaunchedKernel], bool]:
    """Decode the answer to ``LAUNCHES``, and whether there are more. Raises :class:`Garbled`."""
    rows, more = decode_rows(body, LAUNCHED_KERNEL, "kernels", "a kernel's name")
    return [
        LaunchedKernel(
            *(name, module, launches, idempotent, overwrites),
            suspect=bool(flags & _SUSPECT),
            guessed=bool(flags & GUESSED),
            summary=summary if flags & ANALYSED else None,
        )
        for (module, launches, idempotent, overwrites, flags, summary, _), name in rows
    ], more


def decode_rows(
    body: bytes, layout: struct.Struct, what: str, text: str
) -> tuple[list[tuple[tuple[Any, ...], str]], bool]:
    """Decode a list of rows, the last field of which is the length of a text that follows the row:
    return the other fields with the text, and whether there are more rows.

    ``what`` and ``text`` name the rows and their texts. Raises :class:`Garbled`.
    """
    count, more = unpack(ROW_LIST, body[: ROW_LIST.size])
    rows = []
    at = ROW_LIST.size
    for _ in range(count):
        start = at + layout.size
        *fields, length = unpack(layout, body[at:start])
        at = start + length
        if length > MAX_NAME or at > len(body):
            raise Garbled(f"{text} of {length} bytes")
        rows.append((tuple(fields), printable(body[start:at])))
    if at != len(body):
        raise Garbled(f"a list of {len(body)} bytes for {count} {what}")
    return rows, bool(more and rows)


def decode_release(body: bytes) -> ReleaseState:
    """Decode the answer to ``EMPTY_CACHE``. Raises :class:`Garbled`."""
    release, _, reason = unpack(RELEASE_STATE, body)
    if release not in list(Release):
        raise Garbled(f"a release that does not exist ({release})")
    return ReleaseState(Release(release), printable(reason.split(b"\0", 1)[0]))


def decode_program(body: bytes) -> ProgramState:
    """Decode the answer to ``PROGRAM``. Raises :class:`Garbled`."""
    declared, waiting, refused, _, wish, reason = unpack(PROGRAM_STATE, body)
    text = printable(reason.split(b"\0", 1)[0])
    return ProgramState(bool(declared), waiting, bool(refused), wish, text)


def unpack(layout: struct.Struct, body: bytes) -> tuple[Any, ...]:
    """Return the fields of ``body``. Raises :class:`Garbled` if its size is not ``layout``'s."""
    if len(body) != layout.size:
        raise Garbled(f"{len(body)} bytes instead of {layout.size}")
    return layout.unpack(body)


def printable(raw: bytes) -> str:
    """Decode text of a program for a message, without characters that control a terminal."""
    text = raw.decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


class Channel:
    """Requests over a connected socket, one at a time. A failed request ends the connection.

    A request that the hook refuses (:class:`PhosError`) does not end it.
    """

    def __init__(self, pid: int, owner: int, connection: socket.socket) -> None:
        self._pid = pid
        self._owner = owner
        self._socket = connection
        self._sequence = 0
        self._tainted = False

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._socket.fileno() < 0

    def close(self) -> None:
        """End the connection, when all that the peer has sent is received.

        One on which something came that may not be closed stays open, and so does all that is still
        in it.
        """
        if self.closed:
            return
        with contextlib.suppress(OSError):  # the peer has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.settimeout(0)
        left: list[int] = []
        with contextlib.suppress(OSError):
            while not self._tainted and self._receive_some(MAX_PAYLOAD, left):
                close_all(self._judged(left))
                left.clear()
        if self._tainted:
            self._socket.detach()
        else:
            self._socket.close()

    def request(
        self, type_: Type, payload: bytes, descriptors: Sequence[int], patience: float
    ) -> tuple[bytes, list[int]]:
        """Send a request with its descriptors, and wait for at most ``patience`` seconds in total.

        Returns the payload of the answer and its descriptors, which the caller closes. A process
        that is stopped is waited for as :mod:`~phosd.engine.system.standstill` has it.
        """
        end = time.monotonic() + patience
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        header = HEADER.pack(
            MAGIC, VERSION, type_, self._sequence, 0, len(payload), len(descriptors)
        )
        try:
            self._send(header + payload, descriptors, end)
            status, body, received = self._reply(type_, end)
        except TimeoutError as error:
            self.close()
            raise Timeout(
                f"the hook of process {self._pid} did not answer {type_.name} in {patience:.3g} s",
                hint="the process may be stopped; see `phos doctor`",
            ) from error
        except Busy as stopped:
            self.close()
            raise Timeout(
                f"the hook of process {self._pid} did not answer {type_.name}: {stopped.what}",
                hint=stopped.hint,
            ) from stopped
        except OSError as error:
            self.close()
            raise NoSuchProcess(
                f"the hook of process {self._pid} went away during {type_.name}"
                f" ({error.strerror or error})",
                hint="the process may have ended: see `phos ps`",
            ) from error
        except Garbled as error:
            raise self.broken(str(error)) from None
        if status == Status.OK:
            return body, received
        close_all(received)
        if status == Status.BAD_MESSAGE:
            self.close()  # the hook does the same
        kind, hint = _ERRORS.get(status, (Internal, "report this with the versions of both"))
        reason = Reason.NOT_PARKABLE if kind is Unsupported else ""
        raise kind(f"process {self._pid}: {printable(body)}", hint=hint, reason=reason)

    def broken(self, what: str) -> Internal:
        """End the connection. Returns the error for an answer that violates the protocol."""
        self.close()
        return Internal(
            f"the hook of process {self._pid} sent {what}",
            hint="the hook and phosd are of different versions; restart the program",
        )

    def _send(self, message: bytes, descriptors: Sequence[int], end: float) -> None:
        self._socket.settimeout(_left(end))
        sent = socket.send_fds(self._socket, [message], list(descriptors))
        if rest := message[sent:]:  # even an empty send fails once the peer has closed
            self._socket.settimeout(_left(end))
            self._socket.sendall(rest)

    def _reply(self, type_: Type, end: float) -> tuple[int, bytes, list[int]]:
        descriptors: list[int] = []
        try:
            header = HEADER.unpack(self._receive(HEADER.size, end, descriptors))
            descriptors = self._judged(descriptors)
            if self._tainted:
                raise Garbled("files or sockets instead of memory")
            magic, version, answer, sequence, status, length, count = header
            if magic == MAGIC and version != VERSION:
                raise Garbled(
                    f"an answer in version {version} of the protocol; this phosd speaks {VERSION}"
                )
            if (
                (magic, version, answer, sequence)
                != (MAGIC, VERSION, type_ | REPLY, self._sequence)
                or count != len(descriptors)
                or length > MAX_PAYLOAD
                or (descriptors and type_ not in (Type.EXPORT_BLOCKS, Type.MAKE_BLOCKS))
            ):
                raise Garbled(f"an answer to {type_.name} that does not fit it")
            body = self._receive(length, end, descriptors)
            if len(descriptors) > count:
                raise Garbled("descriptors in the middle of an answer")
            return status, body, descriptors
        except BaseException:
            close_all(self._judged(descriptors))
            raise

    def _judged(self, descriptors: Sequence[int]) -> list[int]:
        """Return the descriptors that may be closed; if there are others, the peer is not trusted
        any more.
        """
        good = without_files_of_others(descriptors, self._owner)
        self._tainted = self._tainted or len(good) < len(descriptors)
        return good

    def _receive(self, size: int, end: float, descriptors: list[int]) -> bytes:
        """Receive ``size`` bytes; add what comes with them to ``descriptors``."""
        data = bytearray()
        while len(data) < size:
            self._socket.settimeout(min(_left(end), standstill.LOOK_SECONDS))
            try:
                part = self._receive_some(size - len(data), descriptors)
            except TimeoutError:
                standstill.require_going(self._pid)
                continue
            if not part:
                raise ConnectionResetError("connection closed")
            data += part
        return bytes(data)

    def _receive_some(self, size: int, descriptors: list[int]) -> bytes:
        part, control, _, _ = self._socket.recvmsg(size, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, raw in control:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors += array.array("i", raw[: len(raw) - len(raw) % 4])
        return part


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def close_all(descriptors: Iterable[int]) -> None:
    """Close received descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)
