"""Allocate the pinned ring: slots of host memory that the device copies to and from at full speed.

Pinning is slow (0.4 s per GB, a tenth of that in huge pages), so it is done once. Each slot has a
staging slot of the same layout in device memory: the bytes that are hashed there are those that are
copied out.
"""

import ctypes
import mmap
import queue
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from phosd.engine.digest import SIZE
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.packs import PAGE, RECORD
from phosd.engine.system.cuda import call, driver
from phosd.engine.system.prefault import THREADS, address_of, touch_all
from phosd.errors import InvalidOption

_SLOTS = 24
"""Slots of a ring that is large enough: for 16 threads, and some in flight."""
_MAX_RECORDS = 15
"""Records per slot: about 32 MiB. More gains nothing and starts the pipeline later."""
_WINDOW_RECORDS = 2
"""Records per window. All windows together stay in the processor's cache: 52 GB/s go from a file in
memory to the device through windows of 4 MiB, 42 GB/s through those of 16 MiB (H100's host).
"""


@dataclass(frozen=True)
class Window:
    """A part of a slot that is read or written while the device is at another: its host address,
    how many ``records`` it has room for, and the ``event`` after which the device is done with it.
    """

    host: int
    records: int
    event: Any


class Slot:
    """A part of the ring. ``host`` and ``staging`` are addresses, ``view`` is the host memory.

    ``table`` is the pinned address of the digest kernel's table, followed by its results. Events:
    the chunks are ``staged``, then ``hashed``, then everything is done (``event``). What goes
    through its ``windows`` goes by its ``stream``.
    """

    def __init__(self, index: int, host: int, staging: int, size: int, table: int) -> None:
        self.index = index
        self.host = host
        self.staging = staging
        self.view = memoryview((ctypes.c_char * size).from_address(host)).cast("B")
        self.table = table
        entries = (ctypes.c_char * (_MAX_RECORDS * SIZE)).from_address(table)
        self.entries = memoryview(entries).cast("B")
        self.results = table + len(self.entries)
        results = (ctypes.c_char * (_MAX_RECORDS * SIZE)).from_address(self.results)
        self.digests = memoryview(results).cast("B")
        flags = driver().CUevent_flags
        kind = flags.CU_EVENT_BLOCKING_SYNC | flags.CU_EVENT_DISABLE_TIMING
        self.staged, self.hashed, self.event = (call("cuEventCreate", kind) for _ in range(3))
        self.stream = call("cuStreamCreate", driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
        records = max(1, min(_WINDOW_RECORDS, size // RECORD // 2))
        self.windows = tuple(
            Window(host + at, records, call("cuEventCreate", kind))
            for at in range(0, min(size, 2 * records * RECORD), records * RECORD)
        )


class RingMemory:
    """The host memory of a ring of ``byte_count`` bytes, not pinned yet: making it takes no GPU.

    Raises :class:`InvalidOption` if it cannot hold two chunks.
    """

    def __init__(self, byte_count: int) -> None:
        total = byte_count // RECORD
        if total < 2:
            raise InvalidOption(
                f"a ring of {byte_count} bytes is too small", hint=f"give it {8 * RECORD} or more"
            )
        self.records = max(1, min(_MAX_RECORDS, total // _SLOTS))
        self.count = total // self.records
        """Slots, of ``records`` records each; a page for each lies behind all of them."""
        size = self.count * (self.records * RECORD + PAGE)
        self._memory = mmap.mmap(
            -1, -(-size // CHUNK) * CHUNK, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self.address = address_of(self._memory)
        with suppress(OSError), ThreadPoolExecutor(THREADS) as pool:  # older kernels have neither
            self._memory.madvise(mmap.MADV_HUGEPAGE)
            for piece in touch_all(pool, self.address, len(self._memory)):
                piece.result()

    def pin(self) -> None:
        """Pin it, for the device to copy to and from at full speed."""
        size = len(self._memory)
        call("cuMemHostRegister", self.address, size, 0, about=f"a pinned ring of {size} bytes")


class Ring:
    """The slots of pinned memory, and as much device memory for staging."""

    def __init__(self, memory: RingMemory) -> None:
        self.records = memory.records
        """Records of whole chunks that fit into a slot."""
        self._memory = memory
        count, size = memory.count, memory.records * RECORD
        memory.pin()
        host = memory.address
        staging = int(call("cuMemAlloc", count * size, about="the mover's staging slots"))
        tables = host + count * size
        self.slots = [
            Slot(i, host + i * size, staging + i * size, size, tables + i * PAGE)
            for i in range(count)
        ]
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self.slots:
            self._free.put(slot)

    @property
    def free(self) -> int:
        """The number of free slots, which :meth:`take` returns without waiting."""
        return self._free.qsize()

    def take(self) -> Slot:
        """Return a free slot; wait for one."""
        return self._free.get()

    def give(self, slot: Slot) -> None:
        """Return a slot that neither the device nor a thread uses any more."""
        self._free.put(slot)
