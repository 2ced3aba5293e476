"""Allocate the pinned ring: slots of host memory that the device copies to and from at full speed.

Pinning is slow (0.4 to 0.9 s per GB), so it is done once. Each slot has a staging slot of the same
layout in device memory: the bytes that are hashed there are those that are copied out.
"""

import ctypes
import queue

from phosd.engine.digest import SIZE
from phosd.engine.image.packs import PAGE, RECORD
from phosd.engine.system.cuda import call, driver
from phosd.errors import InvalidOption

_SLOTS = 24
"""Slots of a ring that is large enough: for 16 threads, and some in flight."""
_MAX_RECORDS = 15
"""Records per slot: about 32 MiB. More gains nothing and starts the pipeline later."""


class Slot:
    """A part of the ring. ``host`` and ``staging`` are addresses, ``view`` is the host memory.

    ``table`` is the pinned address of the digest kernel's table, followed by its results. Events:
    the chunks are ``staged``, then ``hashed``, then everything is done (``event``).
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


class Ring:
    """Pinned memory of ``byte_count`` bytes, and as much device memory for staging.

    Raises :class:`InvalidOption` if the ring cannot hold two chunks.
    """

    def __init__(self, byte_count: int) -> None:
        total = byte_count // RECORD
        if total < 2:
            raise InvalidOption(
                f"a ring of {byte_count} bytes is too small", hint=f"give it {8 * RECORD} or more"
            )
        self.records = max(1, min(_MAX_RECORDS, total // _SLOTS))
        """Records of whole chunks that fit into a slot."""
        count = total // self.records
        size = self.records * RECORD
        about = f"a pinned ring of {byte_count} bytes"
        host = int(call("cuMemHostAlloc", count * (size + PAGE), 0, about=about))
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
