"""Copy packs into device memory, and hash it there before any process may use it.

Threads read runs of records into the pinned ring, window by window, and copy their chunks to their
places while they read the next; from a pack that is pinned itself the device copies them without
the ring. A chunk that occurs several times is read once and copied on the device. Blocks may be
created meanwhile: those that are there are filled.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phosd.engine.digest import SIZE
from phosd.engine.faults import Point, point
from phosd.engine.image.manifest import ChunkRef
from phosd.engine.image.packs import record_size
from phosd.engine.mover.protocol.wire import Load
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.pinned_packs import pack_file
from phosd.engine.mover.worker.transfer import Transfer, WorkerPool, close_all, reopen_direct
from phosd.engine.mover.worker.window_copy import BAD, WindowedPack
from phosd.engine.system.cuda import call
from phosd.errors import ImageCorrupt, Internal

_READERS = max(4, min(16, os.cpu_count() or 1))
_OF_PINNED = 3
"""Threads that keep the copy engine busy where it reads the packs itself. More of them only hold up
the one that allocates blocks meanwhile: it took 47 ms for 142 of them, and takes 13 alone (H200).
"""


@dataclass(frozen=True)
class _Chunk:
    """A stored chunk and the device addresses that it is copied to."""

    ref: ChunkRef
    addresses: list[int]


def load(transfer: Transfer, request: Load, descriptors: Sequence[int]) -> None:
    """Fill blocks from packs and hash them; ``descriptors`` are the packs', open for reading.

    Raises :class:`ImageCorrupt` naming the first chunk that does not have its saved bytes.
    """
    gpu, ring = transfer.gpu, transfer.ring
    if len(request.packs) != len(descriptors):
        raise Internal(f"{len(request.packs)} packs came with {len(descriptors)} descriptors")
    pinned = transfer.pinned_packs
    direct = [reopen_direct(fd, os.O_RDONLY) for fd in descriptors]
    sources = {
        number: WindowedPack(f"pack {number}", fd, again, pinned.find(pack_file(fd)))
        for number, fd, again in zip(request.packs, descriptors, direct, strict=True)
    }
    stored: dict[tuple[int, int], _Chunk] = {}

    def fetch(batch: list[_Chunk]) -> None:
        slot = ring.take()
        try:
            workers.check()
            number = batch[0].ref.pack
            if number not in sources:
                raise ImageCorrupt(f"pack {number} was not handed to the mover", hint=BAD)
            records = [(c.addresses[0], c.ref.offset, c.ref.length) for c in batch]
            short = point(Point.MOVER_READ)
            point(Point.MOVER_COPY_IN)
            sources[number].copy_in(records, slot, short=short)
        finally:
            ring.give(slot)
        transfer.report(sum(c.ref.length for c in batch))

    readers = _OF_PINNED if all(source.is_pinned for source in sources.values()) else _READERS
    try:
        with WorkerPool(transfer, min(readers, len(ring.slots))) as workers:
            for blocks in _arriving(gpu, request, workers.check):
                for batch in _batches(_new_chunks(gpu, blocks, stored), ring.records):
                    workers.submit(fetch, batch)
        repeated = [chunk for chunk in stored.values() if len(chunk.addresses) > 1]
        with gpu.streams.lent(1) as (stream,):
            for chunk in repeated:
                _repeat(chunk, stream)
        transfer.report(sum(c.ref.length * (len(c.addresses) - 1) for c in repeated))
    finally:
        close_all(direct)
    _compare(gpu, request)


def _repeat(chunk: _Chunk, stream: Any) -> None:
    """Copy a chunk from its first place to its others. Where these follow one another, what is
    there is doubled: memory that nobody has written is one chunk many thousand times.
    """
    first, *others = chunk.addresses
    length = chunk.ref.length
    for start, count in _rows(others, length):
        call("cuMemcpyDtoDAsync", start, first, length, stream)
        done = 1
        while done < count:
            more = min(done, count - done)
            call("cuMemcpyDtoDAsync", start + done * length, start, more * length, stream)
            done += more


def _rows(addresses: Sequence[int], length: int) -> Iterator[tuple[int, int]]:
    """Yield the places that follow one another, ``length`` bytes apart, as (first, number)."""
    start, count = 0, 0
    for address in addresses:
        if count and address == start + count * length:
            count += 1
            continue
        if count:
            yield start, count
        start, count = address, 1
    if count:
        yield start, count


def _arriving(
    gpu: Gpu, request: Load, check: Callable[[], None]
) -> Iterator[Sequence[tuple[int, list[ChunkRef]]]]:
    """Yield the blocks of a request in order, as many at a time as there are by then."""
    blocks = request.blocks
    keys = [key for key, _ in blocks]
    at = 0
    while at < len(blocks):
        end = at + gpu.created(keys[at:], check) if request.arriving else len(blocks)
        yield blocks[at:end]
        at = end


def _new_chunks(
    gpu: Gpu,
    blocks: Sequence[tuple[int, list[ChunkRef]]],
    stored: dict[tuple[int, int], _Chunk],
) -> list[_Chunk]:
    """Return the chunks of blocks that are not ``stored`` yet, each once, ordered by pack. All are
    added to that, by (pack, offset).
    """
    new: list[tuple[int, int]] = []
    for key, refs in blocks:
        chunks = gpu.block(key).chunks
        if [length for _, length in chunks] != [ref.length for ref in refs]:
            raise Internal(f"block {key} is not cut into chunks as its image says")
        for (address, _), ref in zip(chunks, refs, strict=True):
            place = (ref.pack, ref.offset)
            if place not in stored:
                stored[place] = _Chunk(ref, [])
                new.append(place)
            elif stored[place].ref != ref:
                raise ImageCorrupt(f"two chunks share the place {ref.offset} of pack {ref.pack}")
            stored[place].addresses.append(address)
    return [stored[place] for place in sorted(new)]


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
                    hint=BAD,
                )
