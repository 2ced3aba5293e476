"""Copy packs into device memory, and hash it there before any process may use it.

Threads read runs of records into the pinned ring, window by window, and copy their chunks to their
places while they read the next; from a pack that is pinned itself the device copies them without
the ring. A chunk that occurs several times is read once and copied on the device.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    chunks = _stored_chunks(gpu, request)

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
        transfer.report(sum(c.ref.length * len(c.addresses) for c in batch))

    try:
        with WorkerPool(transfer, min(_READERS, len(ring.slots))) as workers:
            for batch in _batches(chunks, ring.records):
                workers.submit(fetch, batch)
        with gpu.streams.lent(1) as (stream,):
            for chunk in chunks:
                for address in chunk.addresses[1:]:
                    size = chunk.ref.length
                    call("cuMemcpyDtoDAsync", address, chunk.addresses[0], size, stream)
    finally:
        close_all(direct)
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
                    hint=BAD,
                )
