"""Share a chunk map between a process's hook, the movers and the engine while chunks are saved.

``phosd/hook/protocol/chunk_map.h`` defines the layout and the states. The engine creates one for
each process (:meth:`ChunkMap.create`), gives its descriptor to the hook and to the movers, and
keeps it to learn which memory is freed. The program can write everything that is read here: it may
decide what is copied when, and serve for statistics, but never decide what an image holds.
"""

import ctypes
import enum
import errno
import functools
import os
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from phosd.engine.system import native
from phosd.errors import Internal

FREED_RING = 1024
"""Freed blocks that a chunk map can hold until the engine reads them."""

_BLOCK = struct.Struct("<QII")
_SLAB = struct.Struct("<iIII")
_KERNEL = struct.Struct("<QQIIQ")
_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


class Phase(enum.IntEnum):
    """What a chunk map is used for at the moment."""

    ARMED = 0
    WATCHED = 1
    ABORTED = 2


class Event(enum.Enum):
    """What :meth:`ChunkMap.next_event` has waited for."""

    STOPPED = 0
    POSTED = 1
    ENDED = 2


class ChunkState(enum.IntEnum):
    """The low three bits of a chunk's word."""

    PENDING = 0
    COPYING = 1
    SAVED = 2
    SHADOWING = 3
    SHADOWED = 4


@dataclass(frozen=True)
class KernelRow:
    """What is known of a kernel: ``name`` as returned by ``cuFuncGetName``.

    ``module`` is the hash of its module's image, 0 for any. A ``suspect`` is predicted to write all
    memory. ``written``, if known, has bit n set if the kernel writes through the aligned 8 bytes at
    8 n of its parameters, and means that it writes nowhere else.
    """

    name: str
    module: int = 0
    suspect: bool = False
    written: int | None = None

    @property
    def name_hash(self) -> int:
        """64-bit FNV-1a of the name."""
        value = _FNV_OFFSET
        for byte in self.name.encode():
            value = (value ^ byte) * _FNV_PRIME & 0xFFFFFFFFFFFFFFFF
        return value

    @property
    def packed(self) -> bytes:
        """``KernelRow`` of chunk_map.h."""
        flags = self.suspect | (self.written is not None) << 1
        return _KERNEL.pack(self.name_hash, self.module, flags, 0, self.written or 0)


@dataclass(frozen=True)
class ChunkMapStatistics:
    """The hook's counters in a chunk map.

    The writes of ``submissions`` were predicted in ``looked_ns``, waits excluded; ``conservative``
    of them were predicted to write all memory. ``shadowed_chunks`` were copied into slots. Threads
    of the program waited ``waits`` times for a chunk, ``waited_ns`` in total. ``touches`` is the
    last number given to a written chunk. Half the predictions took at most ``look_median_ns``, all
    but one of a hundred ``look_p99_ns``, all but one of a thousand ``look_p999_ns``, and the
    slowest ``look_worst_ns``, give or take 6%; what took longer than 250 µs counts as that.
    """

    submissions: int
    looked_ns: int
    shadowed_chunks: int
    waits: int
    waited_ns: int
    conservative: int
    touches: int
    look_median_ns: int
    look_p99_ns: int
    look_p999_ns: int
    look_worst_ns: int


class ChunkMap:
    """Shared memory with a word for each chunk. ``fd`` stays open until :meth:`close`."""

    def __init__(self, view: int, fd: int, blocks: dict[int, tuple[int, int]]) -> None:
        self._view = view
        self._blocks = blocks
        self._posted: int = library().phos_board_posted(view)
        self.fd = fd

    @classmethod
    def create(
        cls,
        blocks: Sequence[tuple[int, int]],
        slabs: Sequence[tuple[int, int]],
        kernels: Sequence[KernelRow] = (),
    ) -> Self:
        """Create a chunk map in phase armed, with every chunk pending.

        ``blocks``: (block id, number of chunks), ordered by id; ``slabs``: (the process's ordinal
        of the device, number of slots), in the order in which their slots are counted.
        """
        places: dict[int, tuple[int, int]] = {}
        first = 0
        for block_id, count in blocks:
            places[block_id] = (first, count)
            first += count
        if list(places) != sorted(places) or len(places) != len(blocks):
            raise Internal("the blocks of a chunk map must be sorted by id, each once")
        rows = sorted(kernels, key=lambda row: (row.name_hash, row.module))
        tables = (
            *(b"".join(_BLOCK.pack(block, 0, count) for block, count in blocks), len(blocks)),
            *(b"".join(_SLAB.pack(device, slots, 0, 0) for device, slots in slabs), len(slabs)),
            *(b"".join(row.packed for row in rows), len(rows)),
        )
        fd = ctypes.c_int()
        view = library().phos_board_create(*tables, ctypes.byref(fd))
        if not view:
            raise _failed("making a chunk map")
        return cls(view, fd.value, places)

    def first_chunk(self, block_id: int) -> int:
        """Return the number of a block's first chunk; the others follow it."""
        return self._blocks[block_id][0]

    def mark_saved(self, chunks: Iterable[int]) -> None:
        """Mark chunks that need no saving, by number, before the chunk map is shared."""
        numbers = array("I", chunks)
        end = sum(self._blocks[max(self._blocks)]) if self._blocks else 0
        if numbers and max(numbers) >= end:
            raise Internal(f"a chunk map of {end} chunks has no chunk {max(numbers)}")
        library().phos_board_mark_saved(self._view, numbers.tobytes(), len(numbers))

    def touched(self, block_id: int) -> Sequence[int]:
        """Return when each chunk of a block was first written, as a running number; 0: never."""
        return self._read(block_id)[1]

    def states(self, block_id: int) -> Sequence[int]:
        """Return the words of a block's chunks: :class:`ChunkState` in the low three bits."""
        return self._read(block_id)[0]

    def statistics(self) -> ChunkMapStatistics:
        """Return the hook's counters so far."""
        numbers = (ctypes.c_uint64 * 11)()
        library().phos_board_statistics(self._view, numbers)
        return ChunkMapStatistics(*numbers)

    @property
    def phase(self) -> Phase | None:
        """The phase; None if the program has overwritten it."""
        value = library().phos_board_phase(self._view)
        return Phase(value) if value in iter(Phase) else None

    def watch(self) -> None:
        """Note that all chunks are saved; the chunk map then only reports what is freed."""
        library().phos_board_set_phase(self._view, Phase.WATCHED)

    def abort(self) -> None:
        """End the job's use, with all memory released: no thread waits for a chunk any more."""
        library().phos_board_answer(self._view)
        library().phos_board_set_phase(self._view, Phase.ABORTED)

    def hold(self, device: int, byte_count: int) -> None:
        """Announce how much memory of a device (the process's ordinal) the job holds and will free.

        The job frees it step by step, or at once if the program cannot wait (:attr:`is_starving`).
        For a chunk map that is only watched.
        """
        library().phos_board_hold(self._view, device, byte_count)

    @property
    def is_starving(self) -> bool:
        """Whether the program needs all the announced memory of a device at once."""
        return bool(library().phos_board_is_starving(self._view))

    def freed(self) -> list[int] | None:
        """Return the ids of blocks freed since the last call; None if some were lost: list them."""
        ids = (ctypes.c_uint64 * FREED_RING)()
        count = library().phos_board_freed(self._view, ids)
        return None if count < 0 else ids[:count]

    def taken(self) -> None:
        """Tell the hook that the blocks from :meth:`freed` are released: allocations go on."""
        library().phos_board_freed_taken(self._view)

    def next_event(self, pidfd: int) -> Event:
        """Wait for a post of the hook, the end of the process of ``pidfd``, or
        :meth:`stop_watching`. The interpreter has nothing to do meanwhile.
        """
        event = Event(library().phos_board_watch(self._view, self._posted, pidfd))
        self._posted = library().phos_board_posted(self._view)
        return event

    def stop_watching(self) -> None:
        """Make :meth:`next_event` return on the other thread, within a tenth of a second."""
        library().phos_board_stop_watching(self._view)

    def close(self) -> None:
        """Unmap the chunk map and close its descriptor. Can be called twice."""
        if self._view:
            library().phos_board_close(self._view)
            os.close(self.fd)
            self._view, self.fd = 0, -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, block_id: int) -> tuple["array[int]", "array[int]"]:
        first, count = self._blocks[block_id]
        words, touched = array("I", bytes(4 * count)), array("I", bytes(4 * count))
        to = [(ctypes.c_uint32 * count).from_buffer(part) for part in (words, touched)]
        library().phos_board_read(self._view, first, count, *to)
        return words, touched


class ChunkMapView:
    """A mapping of another process's chunk map by its descriptor, which the caller keeps."""

    def __init__(self, fd: int) -> None:
        self.handle: int = library().phos_board_open(fd) or 0
        if not self.handle:
            raise _failed("opening a chunk map")

    def close(self) -> None:
        """Unmap the chunk map."""
        library().phos_board_close(self.handle)


@functools.cache
def library() -> ctypes.CDLL:
    """Load the native library of chunk maps and plans, and declare its functions."""
    found = ctypes.CDLL(str(native.board_library()), use_errno=True)
    pointer, number, text = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_char_p
    tables = (text, number) * 3
    for name, result, arguments in (
        ("create", pointer, (*tables, pointer)),
        ("open", pointer, (ctypes.c_int,)),
        ("close", None, (pointer,)),
        ("mark_saved", None, (pointer, text, ctypes.c_size_t)),
        ("read", None, (pointer, number, number, pointer, pointer)),
        ("statistics", None, (pointer, pointer)),
        ("phase", number, (pointer,)),
        ("set_phase", None, (pointer, number)),
        ("answer", None, (pointer,)),
        ("hold", None, (pointer, number, ctypes.c_uint64)),
        ("is_starving", ctypes.c_int, (pointer,)),
        ("posted", number, (pointer,)),
        ("watch", ctypes.c_int, (pointer, number, ctypes.c_int)),
        ("stop_watching", None, (pointer,)),
        ("freed", ctypes.c_int, (pointer, pointer)),
        ("freed_taken", None, (pointer,)),
    ):
        function = getattr(found, f"phos_board_{name}")
        function.restype, function.argtypes = result, arguments
    return found


def _failed(what: str) -> Internal:
    code = ctypes.get_errno()
    strange = code in (errno.EBADMSG, errno.EINVAL)  # no seals, or not the layout of a chunk map
    hint = "it is not a chunk map of this version; run `make build`"
    return Internal(
        f"{what} failed ({os.strerror(code)})",
        hint=hint if strange else "free memory and descriptors, and try again",
    )
