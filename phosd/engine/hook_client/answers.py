"""Decode what a hook answers.

Messages come from programs of any user, so everything is checked before it is used.
"""

import re
import struct
from dataclasses import dataclass
from typing import Any

from phosd.engine.hook_client.wire import (
    ANALYSED,
    BLOCK,
    BLOCK_LIST,
    DEVICE_ID,
    GATE_STATE,
    GUESSED,
    HELLO,
    KERNEL,
    LAUNCHED_KERNEL,
    MAX_NAME,
    PROGRAM_STATE,
    RELEASE_STATE,
    ROW_LIST,
    BlockFlag,
    HookState,
    Release,
)
from phosd.engine.system.cuda import gpu_uuid

_IMPORTS, _MAKES = 1, 2  # wire.h's Memories
_SUSPECT = 1  # chunk_map.h's kSuspect


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
    """A kernel that was launched, as :class:`Kernel`, with what its table says of it.

    ``idempotent`` counts launches that would leave the same memory if they were run again, the next
    number those that may not, because what they read meets what they write. ``summary`` has
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
