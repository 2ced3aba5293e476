"""The client of the hook in a GPU process. docs/hook-protocol.md explains the messages.

``phosd/hook/wire.h`` is the other side; every layout here has its name there.
"""

import array
import contextlib
import enum
import os
import socket
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from phosd.engine.errors import (
    Busy,
    Internal,
    NoSuchProcess,
    NotAuthorized,
    OutOfMemory,
    PhosError,
    Timeout,
    Unsupported,
)

MAGIC = 0x534F4850
VERSION = 1
REPLY = 0x8000
MAX_PAYLOAD = 1 << 16
MAX_DESCRIPTORS = 128
DEADLINE = 30.0
"""Seconds that one request may take. Unmapping 1,170 blocks took 27 ms on an H200."""

_HEADER = struct.Struct("<IHHIIII")
_HELLO = struct.Struct("<8I256s")
_BLOCK = struct.Struct("<QQQiI")
_BLOCK_LIST = struct.Struct("<IIQQ")
_GATE_STATE = struct.Struct("<IIIIQQQ")
_U64 = struct.Struct("<Q")


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


class HookState(enum.IntEnum):
    """Where the gate is; see wire.h."""

    RUNNING = 0
    CLOSING = 1
    CLOSED = 2
    PARKED = 3


class BlockFlag(enum.IntFlag):
    """What a block is; see wire.h."""

    HAS_DESCRIPTOR = 1
    EXPORTED = 2
    IMPORTED = 4
    PROGRAM_VMM = 8
    HOST_LOCATED = 16


@dataclass(frozen=True)
class Hello:
    """What the hook says of its process."""

    pid: int
    driver_version: int
    devices: int
    state: HookState
    parkable: bool
    ever_parked: bool
    uses_unsupported: bool
    reason: str


@dataclass(frozen=True)
class Block:
    """One physical allocation; ``size`` in bytes, ``device`` as the process numbers it."""

    id: int
    va: int
    size: int
    device: int
    flags: BlockFlag


@dataclass(frozen=True)
class GateState:
    """How far a closing gate has come."""

    settled: bool
    busy: bool
    waiting: int
    capturing: int
    admitted: int
    last_id: int
    freed: int


_ERRORS: dict[int, tuple[type[PhosError], str]] = {
    1: (Internal, "the hook and phosd are of different versions; restart the program"),
    2: (Internal, "another client may be at work on this process"),
    3: (Unsupported, "use mode=driver, or start the program anew"),
    4: (Busy, "try again, or raise the deadline"),
    5: (Internal, "see the hook's log: `phos ps --log PID`"),
    6: (OutOfMemory, "free device memory and try again"),
}


def socket_path(runtime_dir: Path, pid: int) -> Path:
    """Where the hook of ``pid`` listens."""
    return runtime_dir / "hook" / f"{pid}.sock"


class HookLink:
    """A connection to the hook of one process. One request at a time, each with a deadline."""

    def __init__(self, pid: int, runtime_dir: Path) -> None:
        self.pid = pid
        self.runtime_dir = runtime_dir
        self._socket: socket.socket | None = None
        self._sequence = 0

    def connect(self) -> Self:
        """Connect and check that the peer is the process itself (the folder is anybody's).

        Raises :class:`NoSuchProcess` when no hook listens for the pid.
        """
        path = socket_path(self.runtime_dir, self.pid)
        try:
            status = path.lstat()
            owner = Path(f"/proc/{self.pid}").stat().st_uid
        except FileNotFoundError as error:
            raise NoSuchProcess(
                f"process {self.pid} has no hook (no {path})",
                hint="start it with `phos run`, or use mode=driver",
            ) from error
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != owner:
            raise NotAuthorized(
                f"{path} is not a socket of the owner of process {self.pid}",
                hint="somebody else put it there; remove it",
            )
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(DEADLINE)
        try:
            connection.connect(str(path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            peer_pid, peer_uid, _ = struct.unpack("3i", credentials)
            if (peer_pid, peer_uid) != (self.pid, owner):
                raise NotAuthorized(
                    f"{path} is served by process {peer_pid} (uid {peer_uid}), not {self.pid}",
                    hint="somebody else put it there; remove it",
                )
        except OSError as error:
            connection.close()
            raise NoSuchProcess(
                f"the hook of process {self.pid} does not answer ({error.strerror or error})",
                hint="use mode=driver",
            ) from error
        except NotAuthorized:
            connection.close()
            raise
        self._socket = connection
        return self

    def close(self) -> None:
        """Drop the connection. While the gate is closed and nothing is parked, this opens it."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def connected(self) -> bool:
        """Whether there is a connection; a failed request ends it."""
        return self._socket is not None

    def __enter__(self) -> Self:
        return self if self._socket is not None else self.connect()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    # -- requests ------------------------------------------------------------------------------

    def hello(self) -> Hello:
        """Who the process is and whether it can be parked."""
        body, _ = self._request(Type.HELLO)
        pid, version, devices, state, parkable, ever, unsupported, _, reason = _HELLO.unpack(body)
        text = reason.split(b"\0", 1)[0].decode(errors="replace")
        return Hello(
            pid,
            version,
            devices,
            HookState(state),
            bool(parkable),
            bool(ever),
            bool(unsupported),
            text,
        )

    def list_blocks(self, after: int = 0) -> list[Block]:
        """Every block with an id above ``after``, in order of id."""
        return [block for block, _ in self._blocks(Type.LIST_BLOCKS, after)]

    def export_blocks(self, after: int = 0) -> Iterator[tuple[Block, int | None]]:
        """The same with a descriptor each (the caller's to close), None where there is none."""
        return self._blocks(Type.EXPORT_BLOCKS, after)

    def has_imports(self) -> bool:
        """Whether blocks came back by an unpark and nobody else can reach them (see rehome)."""
        return any(not b.flags & BlockFlag.HAS_DESCRIPTOR for b in self.list_blocks())

    def close_gate(self, deadline: float, *, peers_busy: bool) -> GateState:
        """Begin to close the gate, or ask how far it is. ``deadline`` in seconds."""
        body, _ = self._request(
            Type.CLOSE_GATE, struct.pack("<II", int(deadline * 1000), peers_busy)
        )
        settled, busy, *rest = _GATE_STATE.unpack(body)
        return GateState(bool(settled), bool(busy), *rest)

    def open_gate(self) -> None:
        """Let the program work again."""
        self._request(Type.OPEN_GATE)

    def park(self) -> int:
        """Unmap and release every block; how many."""
        return self._count(Type.PARK)

    def unpark(self, memory: Iterable[tuple[int, int]]) -> int:
        """Hand back ``(block id, descriptor)`` for every block and have them mapped; how many."""
        batch: list[tuple[int, int]] = []
        for item in memory:
            batch.append(item)
            if len(batch) == MAX_DESCRIPTORS:
                self._hand_back(batch)
                batch = []
        if batch:
            self._hand_back(batch)
        return self._count(Type.UNPARK)

    def rehome(self) -> int:
        """Make imported blocks the process's own again, on the device; how many."""
        return self._count(Type.REHOME)

    def detach(self) -> None:
        """Have the hook give up its sockets until :meth:`reattach`; the connection ends."""
        self._request(Type.DETACH)
        self.close()

    def stats(self) -> str:
        """Counters and the log ring, as text."""
        body, _ = self._request(Type.STATS)
        return body.decode(errors="replace")

    def reattach(self, deadline: float = DEADLINE) -> None:
        """Wake a detached hook and connect to it again.

        Raises :class:`Timeout` when it does not come back within ``deadline`` seconds.
        """
        wake = socket_path(self.runtime_dir, self.pid).with_suffix(".wake")
        wake.unlink(missing_ok=True)
        os.close(os.open(wake, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
        give_up = time.monotonic() + deadline
        try:
            while True:
                with contextlib.suppress(NoSuchProcess):  # not listening yet
                    self.connect()
                    return
                if not Path(f"/proc/{self.pid}").exists():
                    raise NoSuchProcess(
                        f"process {self.pid} ended before its hook came back",
                        hint="see its output for the reason",
                    )
                if time.monotonic() > give_up:
                    raise Timeout(
                        f"the hook of process {self.pid} did not come back in {deadline:.0f} s",
                        hint="the process may be stopped or wedged; see `phos doctor`",
                    )
                time.sleep(0.0005)
        finally:
            wake.unlink(missing_ok=True)

    # -- framing -------------------------------------------------------------------------------

    def _blocks(self, type_: Type, after: int) -> Iterator[tuple[Block, int | None]]:
        while True:
            body, descriptors = self._request(type_, _U64.pack(after))
            count, more, _, _ = _BLOCK_LIST.unpack_from(body)
            if len(body) != _BLOCK_LIST.size + count * _BLOCK.size:
                _close_all(descriptors)
                raise self._broken(f"a block list of {len(body)} bytes for {count} blocks")
            fields = _BLOCK.iter_unpack(body[_BLOCK_LIST.size :])
            blocks = [
                Block(i, va, size, dev, BlockFlag(flags)) for i, va, size, dev, flags in fields
            ]
            holders = [b for b in blocks if b.flags & BlockFlag.HAS_DESCRIPTOR]
            if type_ is Type.LIST_BLOCKS:
                holders = []
            if len(holders) != len(descriptors):
                _close_all(descriptors)
                raise self._broken(f"{len(descriptors)} descriptors for {len(holders)} blocks")
            held = dict(zip((b.id for b in holders), descriptors, strict=True))
            try:
                for block in blocks:
                    yield block, held.pop(block.id, None)
            finally:
                _close_all(held.values())  # what the caller did not take
            if not more or not blocks:
                return
            after = blocks[-1].id

    def _hand_back(self, batch: Sequence[tuple[int, int]]) -> None:
        ids = [i for i, _ in batch]
        self._request(
            Type.UNPARK_BLOCKS,
            struct.pack(f"<{len(ids) + 1}Q", len(ids), *ids),
            [fd for _, fd in batch],
        )

    def _count(self, type_: Type) -> int:
        body, _ = self._request(type_)
        return int(_U64.unpack(body)[0])

    def _request(
        self, type_: Type, payload: bytes = b"", descriptors: Sequence[int] = ()
    ) -> tuple[bytes, list[int]]:
        if self._socket is None:
            raise Internal(
                f"no connection to the hook of process {self.pid}", hint="connect it first"
            )
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        header = _HEADER.pack(
            MAGIC, VERSION, type_, self._sequence, 0, len(payload), len(descriptors)
        )
        try:
            sent = socket.send_fds(self._socket, [header + payload], list(descriptors))
            if rest := (header + payload)[sent:]:  # even an empty send fails once the peer closed
                self._socket.sendall(rest)
            return self._reply(type_)
        except TimeoutError as error:
            self.close()
            raise Timeout(
                f"the hook of process {self.pid} did not answer {type_.name} in {DEADLINE:.0f} s",
                hint="the process may be stopped; see `phos doctor`",
            ) from error
        except OSError as error:
            self.close()
            raise NoSuchProcess(
                f"the hook of process {self.pid} went away during {type_.name}"
                f" ({error.strerror or error})",
                hint="the process may have ended",
            ) from error

    def _reply(self, type_: Type) -> tuple[bytes, list[int]]:
        header, descriptors = self._receive(_HEADER.size, MAX_DESCRIPTORS)
        magic, version, answer, sequence, status, length, count = _HEADER.unpack(header)
        if (magic, version, answer, sequence, count) != (
            MAGIC,
            VERSION,
            type_ | REPLY,
            self._sequence,
            len(descriptors),
        ) or length > MAX_PAYLOAD:
            _close_all(descriptors)
            raise self._broken(f"an answer to {type_.name} that does not fit it")
        body, _ = self._receive(length, 0)
        if status:
            _close_all(descriptors)
            kind, hint = _ERRORS.get(status, (Internal, ""))
            raise kind(f"process {self.pid}: {body.decode(errors='replace')}", hint=hint)
        return body, descriptors

    def _receive(self, size: int, max_descriptors: int) -> tuple[bytes, list[int]]:
        assert self._socket is not None
        data = bytearray()
        descriptors: list[int] = []
        space = socket.CMSG_SPACE(max_descriptors * 4) if max_descriptors else 0
        while len(data) < size:
            part, control, _, _ = self._socket.recvmsg(
                size - len(data), space, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, raw in control:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors += array.array("i", raw[: len(raw) - len(raw) % 4])
            if not part:
                _close_all(descriptors)
                raise ConnectionResetError("connection closed")
            data += part
        return bytes(data), descriptors

    def _broken(self, what: str) -> Internal:
        self.close()
        return Internal(
            f"the hook of process {self.pid} sent {what}",
            hint="the hook and phosd are of different versions; restart the program",
        )


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
