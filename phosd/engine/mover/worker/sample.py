"""Count the chunks that differ from all others, as far as samples of their bytes tell.

Memory that nobody has written since it was cleared, as most of a key-value cache, is the same
everywhere, and an image stores it once. Digests would tell exactly; but no kernel may run beside
every program (hazard 47), and the copy engines are enough for an estimate.
"""

import random
from collections.abc import Iterator, Sequence

from phosd.engine.image.manifest import CHUNK
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.ring import Ring, Slot
from phosd.engine.mover.worker.transfer import copy_rows
from phosd.engine.system.cuda import call

_SAMPLES = 16
"""Samples of a chunk, each at a random place of another part of it."""
_WIDTH = 64
"""Bytes of a sample."""
_PART = CHUNK // _SAMPLES
_SAMPLED = _SAMPLES * _WIDTH


def count_different(gpu: Gpu, ring: Ring, keys: Sequence[int]) -> int:
    """Return how many chunks of these blocks differ from all before them. Programs may write them
    meanwhile. What is shorter than a chunk counts as different.
    """
    places = [part + random.randrange(0, _PART, _WIDTH) for part in range(0, CHUNK, _PART)]
    seen: set[int] = set()
    short = sum(gpu.block(key).size % CHUNK > 0 for key in keys)
    slot = ring.take()
    try:
        with gpu.streams.lent(1) as (stream,):
            for address, count in _pieces(gpu, keys, len(slot.view) // _SAMPLED):
                try:
                    for number, place in enumerate(places):
                        to = ("host", slot.host + number * _WIDTH, _SAMPLED)
                        copy_rows(to, ("device", address + place, CHUNK), _WIDTH, count, stream)
                finally:
                    call("cuStreamSynchronize", stream, about="samples of device memory")
                seen.update(_sampled(slot, count))
    finally:
        ring.give(slot)
    return len(seen) + short


def _pieces(gpu: Gpu, keys: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Yield the whole chunks of blocks as (address, number), at most so many at a time."""
    for key in keys:
        block = gpu.block(key)
        whole = block.size // CHUNK
        for first in range(0, whole, most):
            yield block.address + first * CHUNK, min(most, whole - first)


def _sampled(slot: Slot, count: int) -> Iterator[int]:
    """Yield a value for the samples of each chunk, equal for equal ones."""
    samples = bytes(slot.view[: count * _SAMPLED])
    return (hash(samples[at : at + _SAMPLED]) for at in range(0, len(samples), _SAMPLED))
