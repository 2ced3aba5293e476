"""Copy packs into device memory, and hash it there before any process may use it.

Threads read runs of records into the pinned ring and copy their chunks to their places; from a pack
that is pinned itself the device copies them without the ring. A chunk that occurs several times is
read once and copied on the device.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phosd.engine.digest import SIZE
from phosd.engine.faults import Point, point
from phosd.engine.image.manifest import CHUNK, ChunkRef
from phosd.engine.image.packs import HEADER, PAGE, RECORD, record_size
from phosd.engine.mover.protocol.wire import Load
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.pinned_packs import PinnedPack, pack_file
from phosd.engine.mover.worker.ring import Slot
from phosd.engine.mover.worker.transfer import (
    Transfer,
    WorkerPool,
    close_all,
    copy_rows,
    reopen_direct,
    runs,
)
from phosd.engine.system.cuda import call
from phosd.errors import ImageCorrupt, Internal

_READERS = max(4, min(16, os.cpu_count() or 1))
_BAD = "the image cannot be restored; `phos verify` tells whether the disk is at fault"


@dataclass(frozen=True)
class _Chunk:
    """A stored chunk and the device addresses that it is copied to."""

    ref: ChunkRef
    addresses: list[int]


class _Source:
    """A pack to read: where it is if it is ``pinned``, otherwise through the page cache if the
    bytes are in it, or directly.
    """

    def __init__(self, number: int, fd: int, pinned: PinnedPack | None) -> None:
        self.number = number
        self._fd = fd
        self._pinned = pinned
        self.direct = reopen_direct(fd, os.O_RDONLY) if pinned is None else -1

    def host(self, slot: Slot, offset: int, size: int) -> int:
        """Return the address of pinned host memory with the bytes from ``offset``, which may be the
        slot's. Raises :class:`ImageCorrupt` at the end of the file.
        """
        if self._pinned is None:
            self._read(slot.view[:size], offset)
            return slot.host
        point(Point.MOVER_READ)
        if offset + size > len(self._pinned.view):
            raise ImageCorrupt(f"pack {self.number} ends before {offset + size}", hint=_BAD)
        return self._pinned.address + offset

    def _read(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``offset``. Raises :class:`ImageCorrupt` at the end of the file."""
        short = point(Point.MOVER_READ)
        fd = self._fd if self.direct < 0 or self._cached(view, offset) else self.direct
        done = 0
        while done < len(view):
            part = view[done : done + PAGE] if short else view[done:]
            short = False
            count = os.preadv(fd, [part], offset + done)
            if not count:
                raise ImageCorrupt(f"pack {self.number} ends at {offset + done}", hint=_BAD)
            done += count

    def _cached(self, view: memoryview, offset: int) -> bool:
        """Return whether the first page is in the page cache, or the file system cannot tell."""
        try:
            return os.preadv(self._fd, [view[:PAGE]], offset, os.RWF_NOWAIT) > 0
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EOPNOTSUPP):
                raise
            return error.errno == errno.EOPNOTSUPP


def load(transfer: Transfer, request: Load, descriptors: Sequence[int]) -> None:
    """Fill blocks from packs and hash them; ``descriptors`` are the packs', open for reading.

    Raises :class:`ImageCorrupt` naming the first chunk that does not have its saved bytes.
    """
    gpu, ring = transfer.gpu, transfer.ring
    if len(request.packs) != len(descriptors):
        raise Internal(f"{len(request.packs)} packs came with {len(descriptors)} descriptors")
    pinned = transfer.pinned_packs
    sources = {
        number: _Source(number, fd, pinned.find(pack_file(fd)))
        for number, fd in zip(request.packs, descriptors, strict=True)
    }
    chunks = _stored_chunks(gpu, request)

    def fetch(batch: list[_Chunk]) -> None:
        slot = ring.take()
        try:
            workers.check()
            first, last = batch[0].ref, batch[-1].ref
            size = last.offset + record_size(last.length) - first.offset
            if first.pack not in sources:
                raise ImageCorrupt(f"pack {first.pack} was not handed to the mover", hint=_BAD)
            host = sources[first.pack].host(slot, first.offset, size)
            point(Point.MOVER_COPY_IN)
            places = (
                (chunk.addresses[0], chunk.ref.offset - first.offset + HEADER, chunk.ref.length)
                for chunk in batch
            )
            stream = pair[slot.index % len(pair)]
            for address, offset, length, rows in runs(places):
                source = ("host", host + offset, RECORD)
                copy_rows(("device", address, CHUNK), source, length, rows, stream)
            call("cuEventRecord", slot.event, stream)
            call("cuEventSynchronize", slot.event, about="a copy into device memory")
            transfer.report(sum(c.ref.length * len(c.addresses) for c in batch))
        finally:
            ring.give(slot)

    try:
        with (
            gpu.streams.lent(2) as pair,
            WorkerPool(transfer, min(_READERS, len(ring.slots))) as workers,
        ):
            for batch in _batches(chunks, ring.records):
                workers.submit(fetch, batch)
        with gpu.streams.lent(1) as (stream,):
            for chunk in chunks:
                for address in chunk.addresses[1:]:
                    size = chunk.ref.length
                    call("cuMemcpyDtoDAsync", address, chunk.addresses[0], size, stream)
    finally:
        close_all([source.direct for source in sources.values()])
    _compare(gpu, request)


def _stored_chunks(gpu: Gpu, request: Load) -> list[_Chunk]:
    """Return each stored chunk once, ordered by pack."""
    found: dict[tuple[int, int], _Chunk] = {}
    for key, refs in request.blocks:
        chunks = gpu.block(key).chunks
        if [length for _, length in chunks] != [ref.length for ref in refs]:
            raise Internal(f"block {key} is not cut into chunks as its image says")
        for (address, _), ref in zip(chunks, refs, strict=True):
            place = (ref.pack, ref.offset)
            if place not in found:
                found[place] = _Chunk(ref, [])
            elif found[place].ref != ref:
                raise ImageCorrupt(f"two chunks share the place {ref.offset} of pack {ref.pack}")
            found[place].addresses.append(address)
    return [found[place] for place in sorted(found)]


def _batches(chunks: Sequence[_Chunk], records: int) -> Iterator[list[_Chunk]]:
    """Yield chunks with consecutive records, as many as fit a slot."""
    batch: list[_Chunk] = []
    for chunk in chunks:
        if batch:
            before = batch[-1].ref
            end = before.offset + record_size(before.length)
            follows = (before.pack, end) == (chunk.ref.pack, chunk.ref.offset)
            if not follows or len(batch) == records:
                yield batch
                batch = []
        batch.append(chunk)
    if batch:
        yield batch


def _compare(gpu: Gpu, request: Load) -> None:
    digests = gpu.digest([key for key, _ in request.blocks])
    for (key, refs), actual in zip(request.blocks, digests, strict=True):
        if actual.hex() == "".join(ref.digest for ref in refs):
            continue
        for index, ref in enumerate(refs):
            if actual[SIZE * index : SIZE * (index + 1)].hex() != ref.digest:
                raise ImageCorrupt(
                    f"chunk {index} of block {key} (record at {ref.offset} of pack {ref.pack}) is"
                    " not what was saved",
                    hint=_BAD,
                )
