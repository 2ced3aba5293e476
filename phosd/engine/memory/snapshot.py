"""Snapshot device memory into free device memory inside the stop, and save it afterwards.

While CRIU works, the program's GPU is idle; it copies and hashes 40 GB in 50 ms (H200). The program
cannot write the copy, so no guess can be wrong, no launch is inspected, and saving uses only the
copy engines. It takes as much free memory as the program has; with less, memory is saved by
copy-on-write (``cow_drain.py``).
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

from phosd.engine.chunk_map.chunk_map import ChunkMap
from phosd.engine.image.manifest import CHUNK, ChunkRef
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo, Undoing
from phosd.engine.memory.background_copy import follow, spare_memory, starved
from phosd.engine.memory.dump import MemoryDump
from phosd.engine.memory.exported import ExportedBlock, distinct, keys_by_gpu, let_go, new_key
from phosd.engine.mover.client.requests import Copies, places, redundant
from phosd.errors import Cancelled, OutOfMemory, changed_in_the_stop

_SLAB = 2 << 30
"""Bytes that are allocated and freed together."""

Turn = Callable[[Collection[int]], AbstractContextManager[None]]
"""A lock on GPUs during which the driver takes no program off them and brings none back, so that
free memory there belongs to no program.
"""


@dataclass
class _CopySlab:
    """Memory of ``size`` bytes for the copies of blocks, ``parts`` of which are not saved yet."""

    gpu: int
    size: int
    parts: int


@dataclass(frozen=True)
class _Copy:
    """The copy of a block; the mover of ``slab.gpu`` knows it by ``key``."""

    key: int
    slab: _CopySlab


class Snapshot(Undoing):
    """The snapshot of a group's memory for one image. The end of the context ends it.

    Call the steps in the order of their definition. Takes at most ``limit`` bytes per GPU (None: no
    limit).
    """

    keeps_waiting = False
    """Whether a program may wait for chunks to be saved."""

    def __init__(
        self,
        dump: MemoryDump,
        turn: Turn,
        limit: int | None = None,
    ) -> None:
        self._dump = dump
        self._memory = dump.memory
        self._turn = turn
        self._limit = limit
        self._copies: dict[int, _Copy] = {}
        self._sizes: Counter[int] = Counter()
        self._chunk_maps: list[tuple[ChunkMap, Sequence[int]]] = []
        self._lock = threading.Lock()
        self._digests: dict[int, list[bytes]] = {}
        self._wanted: dict[int, list[int]] = {}
        self._saved: dict[int, tuple[ChunkRef, ...]] = {}
        self._bytes = 0
        self._seconds = 0.0
        self._account = Progress()
        self._undo = Undo()
        self._pool = ThreadPoolExecutor(thread_name_prefix="snapshot")
        self._hashed: Future[None] | None = None
        self._copied: Future[None] | None = None
        self._is_starving = False

    def make_room(self) -> bool:
        """Allocate memory for a copy of everything; if it does not fit, take none, return False."""
        self._undo.add(self._stop)
        if self._take(distinct(self._memory.all())):
            return True
        self._drop(list(self._copies))
        return False

    def settle(self, progress: Progress) -> None:
        """Allocate memory for blocks that are new since :meth:`make_room`, or save them at once.

        The gates are closed: nothing is allocated any more.
        """
        blocks = {exported.key: exported for exported in distinct(self._memory.all())}
        self._drop([key for key in self._copies if key not in blocks])
        newcomers = [exported for exported in blocks.values() if exported.key not in self._copies]
        if newcomers and not self._take(newcomers):
            late = self._memory.adopted.digest(h for h in newcomers if h.key not in self._copies)
            self._saved = self._dump.save(late, progress, prepared=False)

    def begin(self) -> None:
        """Start hashing on another thread. All memory is parked."""
        self._account.phase("drain")
        self._hashed = self._pool.submit(self._hash)

    def copy(self) -> None:
        """Start copying on other threads. The driver does not use the GPUs at the moment."""
        self._copied = self._pool.submit(self._copy_all)

    def arm(self) -> None:
        """Wait for the copies, and tell the hooks how much memory they take. The gates are closed.

        Raises :class:`MisSpeculation` if the memory was written meanwhile.
        """
        assert self._copied is not None
        self._copied.result()
        chunk_maps = self._memory.watchers.watch_all(self._dump.links)
        gpus = [self._memory.gpus.of(link.pid) for link in self._dump.links]
        with self._lock:
            self._chunk_maps = list(zip(chunk_maps, gpus, strict=True))
            self._tell_held()

    @property
    def bytes_total(self) -> int:
        """The bytes of all chunks, including those that need no copy."""
        return self._bytes

    def finish(self, progress: Progress) -> dict[int, tuple[ChunkRef, ...]]:
        """Save the copies, freeing their memory step by step. Returns each block's chunks by key.

        Raises :class:`OutOfMemory` if the program cannot wait for its memory.
        """
        started = time.monotonic()
        by_gpu: dict[int, dict[int, int]] = {}
        for key, copy in self._copies.items():
            by_gpu.setdefault(copy.slab.gpu, {})[key] = copy.key
        saving = [self._pool.submit(self._save, gpu, copies) for gpu, copies in by_gpu.items()]
        try:
            follow(saving, self._account, progress, self._look)
        except Cancelled:
            if not self._is_starving:
                raise
            raise starved() from None
        finally:
            figures = progress.figures
            figures.snapshot_bytes, figures.snapshot_seconds = self._bytes, self._seconds
            figures.drain_seconds = time.monotonic() - started
            figures.drain_bytes = self._account.phases[-1].bytes_done
        return self._saved | places(self._dump.writer, self._digests)

    def _take(self, blocks: Sequence[ExportedBlock]) -> bool:
        """Allocate memory for copies of these blocks. Returns False if not all fit."""
        by_gpu: dict[int, list[ExportedBlock]] = {}
        for exported in blocks:
            by_gpu.setdefault(exported.gpu, []).append(exported)
        with self._turn(by_gpu.keys()):
            for gpu, here in by_gpu.items():
                size = sum(map(_size, here))
                if self._limit is not None and self._sizes[gpu] + size > self._limit:
                    return False
                if size > spare_memory(self._memory.adopted.mover(gpu)):
                    return False
            try:
                for gpu, here in by_gpu.items():
                    for part in _parts(here):
                        self._allocate(gpu, part)
            except OutOfMemory:  # a neighbour took it
                return False
        return True

    def _allocate(self, gpu: int, blocks: Sequence[ExportedBlock]) -> None:
        slab = _CopySlab(gpu, sum(map(_size, blocks)), len(blocks))
        copies = {exported.key: _Copy(new_key(), slab) for exported in blocks}
        rows = [(copies[exported.key].key, exported.block.size) for exported in blocks]
        self._memory.adopted.mover(gpu).create_together(rows)
        with self._lock:
            self._copies |= copies
            self._sizes[gpu] += slab.size

    def _hash(self) -> None:
        # The new chunk maps report what is freed from now on. Ending a watch takes time, which does
        # not matter on this thread.
        self._memory.watchers.unwatch(link.pid for link in self._dump.links)
        blocks = [h for h in distinct(self._memory.all()) if h.key in self._copies]
        self._bytes = sum(exported.block.size for exported in blocks)
        self._digests = self._memory.adopted.digest(blocks)

    def _copy_all(self) -> None:
        assert self._hashed is not None
        self._hashed.result()
        began = time.monotonic()
        blocks = [h for h in distinct(self._memory.all()) if h.key in self._digests]
        parts = [
            self._pool.submit(self._copy, gpu, keys) for gpu, keys in keys_by_gpu(blocks).items()
        ]
        for part in parts:
            part.result()
        self._seconds = time.monotonic() - began

    def _copy(self, gpu: int, keys: Sequence[int]) -> None:
        """Copy the chunks of a GPU that the image needs, and prove that the copies are equal."""
        digests = {key: self._digests[key] for key in keys}
        needless = redundant(digests, self._dump.writer)
        for key, parts in digests.items():
            without = set(needless.get(key, ()))
            self._wanted[key] = [i for i in range(len(parts)) if i not in without]
        mover = self._memory.adopted.mover(gpu)
        copies = {key: self._copies[key].key for key in keys if self._wanted[key]}
        mover.fetch({copy: (key, self._wanted[key]) for key, copy in copies.items()})
        found = mover.digest(copies.values())
        changed = sum(
            found[copy][index] != digests[key][index]
            for key, copy in copies.items()
            for index in self._wanted[key]
        )
        if changed:
            raise changed_in_the_stop(changed, gpu)

    def _save(self, gpu: int, copies: dict[int, int]) -> None:
        self._drop([key for key in copies if not self._wanted[key]])
        proven = {
            (copy, index): self._digests[key][index]
            for key, copy in copies.items()
            for index in self._wanted[key]
        }
        if not proven:
            return
        keys = {copy: key for key, copy in copies.items()}

        def dropped(gone: Sequence[int]) -> None:
            with self._lock:
                for copy in gone:
                    self._given_back(self._copies.pop(keys[copy]))
                self._tell_held()

        saved = Copies(self._dump.writer, self._dump.packs(gpu))
        mover = self._memory.adopted.mover(gpu)
        mover.copy(proven, saved, self._account, proven=proven, let_go=dropped)
        self._dump.writer.add(saved.refs.values())

    def _look(self) -> None:
        """Cancel the saving if a program has waited for memory in vain: it gets all of it."""
        if any(chunk_map.is_starving for chunk_map, _ in self._chunk_maps):
            self._is_starving = True
            self._account.cancel()

    def _drop(self, keys: Sequence[int]) -> None:
        with self._lock:
            gone = [self._copies.pop(key) for key in keys]
        by_gpu: dict[int, list[_Copy]] = {}
        for copy in gone:
            by_gpu.setdefault(copy.slab.gpu, []).append(copy)
        with Undo() as each:
            for gpu, copies in by_gpu.items():
                each.add(self._told, copies)
                each.add(let_go, self._memory.adopted.mover(gpu), [copy.key for copy in copies])

    def _told(self, copies: Sequence[_Copy]) -> None:
        with self._lock:
            for copy in copies:
                self._given_back(copy)
            self._tell_held()

    def _given_back(self, copy: _Copy) -> None:
        """Count a dropped copy; the memory of its slab is free once all its copies are dropped."""
        copy.slab.parts -= 1
        if not copy.slab.parts:
            self._sizes[copy.slab.gpu] -= copy.slab.size

    def _tell_held(self) -> None:
        """Tell the hooks how much memory will be freed: they wait only if there is some."""
        for chunk_map, gpus in self._chunk_maps:
            for device, gpu in enumerate(gpus):
                chunk_map.hold(device, self._sizes[gpu])

    def _stop(self) -> None:
        self._account.cancel()
        self._pool.shutdown()
        self._drop(list(self._copies))


def _size(exported: ExportedBlock) -> int:
    """Return the bytes that the copy of a block takes."""
    return exported.chunks * CHUNK


def _parts(blocks: Iterable[ExportedBlock]) -> Iterator[list[ExportedBlock]]:
    """Divide blocks into groups to allocate together; one larger than a slab is alone."""
    part: list[ExportedBlock] = []
    size = 0
    for exported in blocks:
        if part and size + _size(exported) > _SLAB:
            yield part
            part, size = [], 0
        part.append(exported)
        size += _size(exported)
    if part:
        yield part
