"""Copy chosen chunks as they are now, each over its earlier copy if there is one."""

import queue
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from phosd.engine.digest import split
from phosd.engine.image.packs import record_size
from phosd.engine.mover.protocol.wire import Copied, Copy
from phosd.engine.mover.worker.copy_out import Chunk, CopyOut, Item, Stripes, fill
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.transfer import Transfer
from phosd.errors import Cancelled, Internal


def copy(
    transfer: Transfer,
    request: Copy,
    descriptors: Sequence[int],
    let_go: Callable[[list[int]], None],
) -> Copied:
    """Copy chunks into packs; ``descriptors`` are those of the packs, open for writing.

    Programs may write the chunks meanwhile: the digests in the reply are those of the saved bytes.
    ``let_go`` is called with the keys of dropped blocks. Raises as :class:`CopyOut` does.
    """
    gpu, ring = transfer.gpu, transfer.ring
    found: dict[tuple[int, int], bytes] = {}
    proven = _proven(request)
    going = _Going(gpu, request, let_go)
    places: dict[tuple[int, int], tuple[int, int, int]] = {}

    def copied(items: Sequence[Item], digests: Sequence[bytes]) -> None:
        for item, digest in zip(items, digests, strict=True):
            found[item.chunk.key, item.chunk.index] = digest

    engines = request.by_copy_engines
    with CopyOut(transfer, request.target, descriptors, copied, by_copy_engines=engines) as out:
        for items in _batches(gpu, request, ring.records):
            for item in items:
                place = (item.pack, item.offset, item.chunk.length)
                places[item.chunk.key, item.chunk.index] = place
            if proven is None:
                out.put(ring.take(), items)
                continue
            digests = [proven[item.chunk.key, item.chunk.index] for item in items]
            with going.all_if_cancelled(out):
                out.put_proven(ring.take(), items, digests, going.note)
                going.drop()
        if proven is not None:
            going.drop_all(out)
    return Copied(
        places=[places[key, index] for key, index, *_ in request.chunks],
        digests=b"".join(found[key, index] for key, index, *_ in request.chunks),
    )


class _Going:
    """Drops the blocks of a request once all their chunks have left the device."""

    def __init__(self, gpu: Gpu, request: Copy, let_go: Callable[[list[int]], None]) -> None:
        self._gpu = gpu
        self._let_go = let_go
        self._left = Counter(key for key, *_ in request.chunks)
        self._gone: queue.SimpleQueue[int] = queue.SimpleQueue()

    def note(self, items: Sequence[Item]) -> None:
        """Note chunks that have left the device. May be called on any thread."""
        for item in items:
            self._gone.put(item.chunk.key)

    def drop(self) -> None:
        """Drop blocks whose chunks have all left. Call this and :meth:`drop_all` on one thread."""
        done = []
        while not self._gone.empty():
            key = self._gone.get()
            self._left[key] -= 1
            if not self._left[key]:
                done.append(key)
        self._drop(done)

    def drop_all(self, out: CopyOut) -> None:
        """Drop the rest, once the chunks in flight have left."""
        out.wait_left()
        self._drop([key for key, count in self._left.items() if count])

    @contextmanager
    def all_if_cancelled(self, out: CopyOut) -> Iterator[None]:
        """Drop all blocks if the job is cancelled inside: it wants the memory back at once."""
        try:
            yield
        except Cancelled:
            self.drop_all(out)
            raise

    def _drop(self, keys: list[int]) -> None:
        if keys:
            for key in keys:
                self._left[key] = 0
            self._gpu.drop_kept(keys)
            self._let_go(keys)


def _proven(request: Copy) -> dict[tuple[int, int], bytes] | None:
    """Return the digests of the chunks, if the request has them."""
    if not request.proven:
        return None
    digests = split(request.proven)
    if len(digests) != len(request.chunks):
        raise Internal(f"{len(request.chunks)} chunks came with {len(digests)} digests")
    rows = zip(request.chunks, digests, strict=True)
    return {(key, index): digest for (key, index, *_), digest in rows}


def _batches(gpu: Gpu, request: Copy, records: int) -> Iterator[list[Item]]:
    """Yield batches: first the chunks that have records, ordered by pack; then the others."""
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
    stripes = Stripes(request.target, request.used)
    done = 0
    while done < len(new):
        stripe, room = stripes.next(records)
        yield fill(stripe, new[done : done + room])
        done += room


def _in_place(places: Sequence[tuple[int, int, Chunk]]) -> Iterator[Item]:
    at = 0
    for pack, offset, chunk in places:
        yield Item(chunk, at, pack, offset)
        at += record_size(chunk.length)
