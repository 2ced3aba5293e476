"""Fetch chunks from blocks on this GPU or others, directly from memory to memory."""

from collections.abc import Iterable, Iterator, Sequence

from phosd.engine.faults import Point, point
from phosd.engine.image.manifest import CHUNK
from phosd.engine.mover.protocol.wire import Fetch
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.gpu_block import GpuBlock
from phosd.engine.mover.worker.transfer import Transfer
from phosd.engine.system.cuda import call
from phosd.errors import Cancelled, Internal

_BATCH = 1 << 30
"""Bytes between checks for cancellation: a few milliseconds over NVLink."""


def fetch(transfer: Transfer, request: Fetch) -> None:
    """Copy the chunks that ``request`` names. Raises :class:`Cancelled`.

    Programs may write the chunks meanwhile; compare digests to know whether the copies are equal.
    """
    gpu = transfer.gpu
    with gpu.streams.lent(1) as (stream,):
        queued = 0

        def settle() -> None:
            call("cuStreamSynchronize", stream, about="a copy between blocks")
            transfer.report(queued)
            if transfer.cancelled():
                raise Cancelled("the transfer was cancelled")

        for source, at, address, size in _pieces(gpu, request):
            short = point(Point.MOVER_FETCH)
            gpu.copy_from(source, at, address, size // 2 if short else size, stream)
            queued += size
            if queued >= _BATCH:
                settle()
                queued = 0
        settle()


def _pieces(gpu: Gpu, request: Fetch) -> Iterator[tuple[GpuBlock, int, int, int]]:
    """Yield (source block, source address, address here, bytes), with adjacent chunks joined."""
    for key, other, indices in request.blocks:
        here, there = gpu.block(key), gpu.block(other)
        if here.size != there.size:
            raise Internal(f"block {key} has {here.size} bytes, block {other} has {there.size}")
        for first, count in _runs(indices):
            start = first * CHUNK
            if first < 0 or start + (count - 1) * CHUNK >= here.size:
                raise Internal(f"block {key} has {len(here.chunks)} chunks, not {first + count}")
            end = min(start + count * CHUNK, here.size)
            for at in range(start, end, _BATCH):
                size = min(_BATCH, end - at)
                yield there, there.address + at, here.address + at, size


def _runs(indices: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Join ascending indices into (first, count)."""
    first, count = -1, 0
    for index in indices:
        if count and index == first + count:
            count += 1
            continue
        if count:
            yield first, count
        first, count = index, 1
    if count:
        yield first, count
