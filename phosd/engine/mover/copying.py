"""Copying: chosen chunks as they are at the moment, each over its earlier copy if it has one."""

from collections.abc import Callable, Iterator, Sequence

from phosd.engine.errors import Internal
from phosd.engine.image.packs import record_size
from phosd.engine.mover.copyout import Chunk, CopyOut, Item, Lanes, fill
from phosd.engine.mover.gpu import Gpu
from phosd.engine.mover.ring import Ring
from phosd.engine.mover.transfer import Report
from phosd.engine.mover.windows import Windows
from phosd.engine.mover.wire import Copied, Copy


def copy(
    gpu: Gpu,
    ring: Ring,
    windows: Windows,
    request: Copy,
    descriptors: Sequence[int],
    cancelled: Callable[[], bool],
    report: Report,
) -> Copied:
    """Copy chunks into packs, of which ``descriptors`` are open for writing.

    Programs may write the chunks meanwhile: what is reported is the digest of what was saved.
    Raises as :class:`CopyOut` does.
    """
    found: dict[tuple[int, int], bytes] = {}
    places: dict[tuple[int, int], tuple[int, int, int]] = {}

    def copied(items: Sequence[Item], digests: Sequence[bytes]) -> None:
        for item, digest in zip(items, digests, strict=True):
            found[item.chunk.key, item.chunk.index] = digest

    way = (gpu, ring, windows, request.target, descriptors, cancelled, report)
    with CopyOut(*way, copied) as out:
        for items in _batches(gpu, request, ring.records):
            for item in items:
                place = (item.pack, item.offset, item.chunk.length)
                places[item.chunk.key, item.chunk.index] = place
            out.put(ring.take(), items)
    return Copied(
        places=[places[key, index] for key, index, *_ in request.chunks],
        digests=b"".join(found[key, index] for key, index, *_ in request.chunks),
    )


def _batches(gpu: Gpu, request: Copy, records: int) -> Iterator[list[Item]]:
    """First the chunks that have records, in the order of the packs; then those that get one."""
    old: list[tuple[int, int, Chunk]] = []
    new: list[Chunk] = []
    for key, index, pack, offset in request.chunks:
        chunks = gpu.block(key).chunks
        if index >= len(chunks):
            raise Internal(f"block {key} has {len(chunks)} chunks, and no chunk {index}")
        chunk = Chunk(key, index, *chunks[index])
        if pack < 0:
            new.append(chunk)
        else:
            old.append((pack, offset, chunk))
    old.sort(key=lambda place: place[:2])
    for at in range(0, len(old), records):
        yield list(_in_place(old[at : at + records]))
    lanes = Lanes(request.target, request.used)
    done = 0
    while done < len(new):
        lane, room = lanes.next(records)
        yield fill(lane, new[done : done + room])
        done += room


def _in_place(places: Sequence[tuple[int, int, Chunk]]) -> Iterator[Item]:
    at = 0
    for pack, offset, chunk in places:
        yield Item(chunk, at, pack, offset)
        at += record_size(chunk.length)
