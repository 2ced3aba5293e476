"""Copy-out: device memory into packs, every byte hashed again on its way.

A chunk is copied to a staging slot in device memory, hashed there, and those very bytes go through
the pinned ring into the pack. Two streams take turns, so that hashing one slot overlaps copying
another; the writing is done by as many threads as keep a fast disk or a tmpfs busy.
"""

import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle

from phosd.engine.cuda import call
from phosd.engine.digest import SIZE
from phosd.engine.errors import Internal, OutOfSpace
from phosd.engine.faults import Point, point
from phosd.engine.image.files import space_errors
from phosd.engine.image.manifest import CHUNK, ChunkRef
from phosd.engine.image.packs import HEADER, RECORD, header_fields, record_size
from phosd.engine.mover.gpu import Gpu
from phosd.engine.mover.ring import Ring, Slot
from phosd.engine.mover.transfer import (
    Crew,
    Report,
    close_all,
    copy_rows,
    reopen_direct,
    runs,
    streams,
)
from phosd.engine.mover.windows import Window, Windows
from phosd.engine.mover.wire import Save, Stored

_WRITERS = max(4, min(16, os.cpu_count() or 1))
_ENTRY = struct.Struct("<QQ")


@dataclass(frozen=True)
class _Item:
    """A chunk to copy. ``place`` is its record's offset in the slot."""

    key: int
    index: int
    address: int
    length: int
    digest: bytes
    place: int


@dataclass
class _Batch:
    """Chunks whose records follow one another in a pack: one write."""

    lane: "_Lane"
    offset: int
    items: list[_Item] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of its records."""
        last = self.items[-1]
        return last.place + record_size(last.length)

    @property
    def end(self) -> int:
        """Where the next record of the pack would begin."""
        return self.offset + self.size


@dataclass
class _Lane:
    """A pack being filled; ``index`` is its place in the request."""

    index: int
    number: int
    capacity: int
    offset: int = 0


class _Planner:
    """Gives every chunk its place: an earlier equal chunk's, or the next record of a pack.

    The packs are filled side by side, because a file system lets one thread at a time write to a
    file.
    """

    def __init__(self, request: Save, gpu: Gpu, records: int) -> None:
        self._request = request
        self._gpu = gpu
        self._records = records
        self._lanes = deque(_Lane(i, *pack) for i, pack in enumerate(request.packs))
        self._seen = {bytes.fromhex(ref.digest): ref for ref in request.known}
        self.stored: list[tuple[int, list[ChunkRef]]] = []
        """Filled as :meth:`batches` goes along."""

    def batches(self) -> Iterator[_Batch]:
        """The batches to copy: one for each pack in turn."""
        batch: _Batch | None = None
        for key, digests in self._request.blocks:
            chunks = self._gpu.block(key).chunks
            if len(digests) != SIZE * len(chunks):
                raise Internal(f"block {key} has {len(chunks)} chunks, not {len(digests) // SIZE}")
            refs: list[ChunkRef] = []
            self.stored.append((key, refs))
            for index, (address, length) in enumerate(chunks):
                digest = digests[SIZE * index : SIZE * (index + 1)]
                if (ref := self._seen.get(digest)) is None:
                    needed = record_size(length)
                    if batch is not None and not self._fits(batch, needed):
                        yield batch
                        batch = None
                    if batch is None:
                        batch = self._begin(needed)
                    lane = batch.lane
                    ref = ChunkRef(digest.hex(), lane.number, lane.offset, length)
                    place = lane.offset - batch.offset
                    batch.items.append(_Item(key, index, address, length, digest, place))
                    lane.offset += needed
                    self._seen[digest] = ref
                refs.append(ref)
        if batch is not None:
            yield batch

    def _fits(self, batch: _Batch, needed: int) -> bool:
        room = batch.lane.capacity - batch.lane.offset
        return len(batch.items) < self._records and needed <= room

    def _begin(self, needed: int) -> _Batch:
        """An empty batch in the next pack that has room."""
        while self._lanes:
            lane = self._lanes.popleft()
            if lane.offset + needed <= lane.capacity:
                self._lanes.append(lane)
                return _Batch(lane, lane.offset)
        raise OutOfSpace("the packs of the image are full", hint="give the mover more packs")


def save(
    gpu: Gpu,
    ring: Ring,
    windows: Windows,
    request: Save,
    descriptors: Sequence[int],
    cancelled: Callable[[], bool],
    report: Report,
) -> Stored:
    """Copy blocks into packs, of which ``descriptors`` are open for writing.

    The device writes into those that are pinned (``windows``); the others get their bytes through
    the ring. A chunk whose digest the image already has is not copied. Raises :class:`OutOfSpace`
    when the disk is full, :class:`Cancelled`.
    """
    planner = _Planner(request, gpu, ring.records)
    pinned = [windows.find(fd) for fd in descriptors]
    direct = [reopen_direct(fd, os.O_WRONLY) for fd in descriptors]
    changed: list[tuple[int, int]] = []

    def finish(work: tuple[_Batch, Slot]) -> None:
        batch, slot = work
        try:
            call("cuEventSynchronize", slot.event, about="a copy out of device memory")
            crew.check()
            place = _destination(batch, slot, pinned)
            changed.extend(_label(request, batch, slot, place))
            index = batch.lane.index
            if not place.in_pack:
                with space_errors(f"pack {batch.lane.number}"):
                    fd = direct[index] if direct[index] >= 0 else descriptors[index]
                    _write(fd, place.view, batch.offset)
            report(sum(item.length for item in batch.items))
        finally:
            ring.give(slot)

    try:
        with streams(2) as pair, Crew(gpu, _WRITERS, cancelled) as crew:
            for batch, stream in zip(planner.batches(), cycle(pair), strict=False):
                slot = ring.take()
                try:
                    crew.check()
                    point(Point.MOVER_COPY_OUT)
                    _enqueue(gpu, batch, slot, _destination(batch, slot, pinned), stream)
                except BaseException:
                    call("cuStreamSynchronize", stream)
                    ring.give(slot)
                    raise
                crew.submit(finish, (batch, slot))
    finally:
        close_all(direct)
    return Stored(planner.stored, sorted(changed))


@dataclass(frozen=True)
class _Place:
    """Pinned host memory for the records of a batch: a slot's, or the pack itself."""

    address: int
    view: memoryview
    in_pack: bool


def _destination(batch: _Batch, slot: Slot, pinned: Sequence[Window | None]) -> _Place:
    window = pinned[batch.lane.index]
    end = batch.offset + batch.size
    if window is None or end > len(window.view):
        return _Place(slot.host, slot.view[: batch.size], in_pack=False)
    return _Place(window.address + batch.offset, window.view[batch.offset : end], in_pack=True)


def _enqueue(gpu: Gpu, batch: _Batch, slot: Slot, place: _Place, stream: object) -> None:
    """Device memory -> staging -> hash -> pinned memory, in the order of one stream."""
    places = ((item.address, HEADER + item.place, item.length) for item in batch.items)
    for address, offset, length, rows in runs(places):
        target = ("device", slot.staging + offset, RECORD)
        copy_rows(target, ("device", address, CHUNK), length, rows, stream)
    for i, item in enumerate(batch.items):
        _ENTRY.pack_into(
            slot.entries, i * _ENTRY.size, slot.staging + HEADER + item.place, item.length
        )
    gpu.launch_digest(stream, slot.table, len(batch.items), slot.results)
    call("cuMemcpyDtoHAsync", place.address, slot.staging, batch.size, stream)
    call("cuEventRecord", slot.event, stream)


def _label(request: Save, batch: _Batch, slot: Slot, place: _Place) -> list[tuple[int, int]]:
    """Write the records' headers; returns the chunks that no longer are what the stop hashed."""
    changed = []
    for i, item in enumerate(batch.items):
        actual = bytes(slot.digests[SIZE * i : SIZE * (i + 1)])
        if actual != item.digest:
            changed.append((item.key, item.index))
        fields = header_fields(request.image, request.owner, actual, item.length)
        place.view[item.place : item.place + HEADER] = fields.ljust(HEADER, b"\0")
    return changed


def _write(fd: int, view: memoryview, offset: int) -> None:
    short = point(Point.MOVER_WRITE)
    done = 0
    while done < len(view):
        part = view[done : done + HEADER] if short else view[done:]
        short = False
        done += os.pwrite(fd, part, offset + done)
