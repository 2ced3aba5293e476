"""Save all chunks of blocks, which no process writes meanwhile, into packs."""

from collections.abc import Iterator, Sequence
from itertools import islice

from phosd.engine.digest import SIZE
from phosd.engine.image.manifest import ChunkRef
from phosd.engine.mover.protocol.wire import Save, Stored
from phosd.engine.mover.worker.copy_out import Chunk, CopyOut, Item, Stripes, fill
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.transfer import Transfer
from phosd.errors import Internal


class _Wanted:
    """The chunks of a request by digest; each is stored once."""

    def __init__(self, gpu: Gpu, request: Save) -> None:
        self._request = request
        self._gpu = gpu
        self._refs = {bytes.fromhex(ref.digest): ref for ref in request.known}
        self._digests = dict(request.blocks)
        for key, digests in request.blocks:
            chunks = gpu.block(key).chunks
            if len(digests) != SIZE * len(chunks):
                raise Internal(f"block {key} has {len(chunks)} chunks, not {len(digests) // SIZE}")

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks to copy."""
        seen = set(self._refs)
        for key, digests in self._request.blocks:
            for index, (address, length) in enumerate(self._gpu.block(key).chunks):
                digest = digests[SIZE * index : SIZE * (index + 1)]
                if digest not in seen:
                    seen.add(digest)
                    yield Chunk(key, index, address, length)

    def digest(self, chunk: Chunk) -> bytes:
        """Return the digest that a chunk must have."""
        return self._digests[chunk.key][SIZE * chunk.index : SIZE * (chunk.index + 1)]

    def place(self, item: Item) -> None:
        """Record the place of a chunk."""
        digest = self.digest(item.chunk)
        number = self._request.target.packs[item.pack][0]
        self._refs[digest] = ChunkRef(digest.hex(), number, item.offset, item.chunk.length)

    def stored(self) -> list[tuple[int, list[ChunkRef]]]:
        """Return the places of every block's chunks, once all have places."""
        return [
            (key, [self._refs[digests[at : at + SIZE]] for at in range(0, len(digests), SIZE)])
            for key, digests in self._request.blocks
        ]


def save(transfer: Transfer, request: Save, descriptors: Sequence[int]) -> Stored:
    """Copy blocks into packs; ``descriptors`` are those of the packs, open for writing.

    A chunk whose digest the image already has is not copied. Raises as :class:`CopyOut` does.
    """
    ring = transfer.ring
    wanted = _Wanted(transfer.gpu, request)
    stripes = Stripes(request.target)
    chunks = wanted.chunks()
    changed: list[tuple[int, int]] = []

    def copied(items: Sequence[Item], digests: Sequence[bytes]) -> None:
        for (chunk, *_), digest in zip(items, digests, strict=True):
            if digest != wanted.digest(chunk):
                changed.append((chunk.key, chunk.index))

    with CopyOut(transfer, request.target, descriptors, copied) as out:
        while batch := list(islice(chunks, 1)):
            stripe, room = stripes.next(ring.records)
            items = fill(stripe, batch + list(islice(chunks, room - 1)))
            for item in items:
                wanted.place(item)
            out.put(ring.take(), items)
    return Stored(wanted.stored(), sorted(changed))
