"""Plan the order in which a mover saves chunks while their programs run, by plan.h."""

import ctypes
import functools
import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple, Self

from phosd.engine.chunk_map import chunk_map
from phosd.engine.chunk_map.chunk_map import ChunkMapView
from phosd.engine.image.manifest import CHUNK
from phosd.engine.mover.protocol.wire import Drain, DrainedBlock
from phosd.engine.mover.worker.copy_out import Chunk
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.gpu_block import GpuBlock
from phosd.errors import Internal

_BLOCK = struct.Struct("<QQII")
_SLAB = struct.Struct("<QIIII")
_CLAIM = struct.Struct("<QIIII")


class PlanStatus(NamedTuple):
    """The progress of a plan.

    ``left`` chunks are not claimed yet, and threads wait for ``urgent`` of them. ``aborted``: the
    job of a chunk map is over. ``wanted``: the level of memory pressure that is not answered yet.
    ``on_the_way`` batches are claimed and have not arrived in host memory.
    """

    left: int
    urgent: int
    aborted: int
    wanted: int
    on_the_way: int


class Plan:
    """Chooses and claims the chunks of a request in batches, numbered as the ring's slots."""

    def __init__(
        self,
        gpu: Gpu,
        request: Drain,
        descriptors: Sequence[int],
        batches: int,
        records: int,
    ) -> None:
        self._keys: list[int] = []
        self._slabs: list[int] = []
        self._claims = ctypes.create_string_buffer(_CLAIM.size * records)
        self._views: list[ChunkMapView] = []
        self._order = 0
        try:
            for fd in descriptors:
                self._views.append(ChunkMapView(fd))
            self._order = self._make(gpu, request, batches)
        except BaseException:
            self.close()
            raise

    def _make(self, gpu: Gpu, request: Drain, batches: int) -> int:
        blocks, slabs = [], []
        wanted, order = bytearray(), bytearray()
        for number, each in enumerate(request.chunk_maps):
            for drained in each.blocks:
                block = gpu.block(drained.key)
                _check(drained, block)
                self._keys.append(drained.key)
                blocks.append(_BLOCK.pack(block.address, block.size, number, drained.first_chunk))
                wanted += drained.wanted
                order += drained.order or bytes(4 * len(block.chunks))
            slot = each.first_slot
            for key in each.slabs:
                block = gpu.block(key)
                self._slabs.append(key)
                slots = block.size // CHUNK
                slabs.append(_SLAB.pack(block.address, number, slot, slots, 0))
                slot += slots
        made = _library().phos_plan_create(
            (ctypes.c_void_p * len(self._views))(*(view.handle for view in self._views)),
            array("I", [each.device for each in request.chunk_maps]).tobytes(),
            len(self._views),
            *(b"".join(blocks), len(blocks), bytes(wanted), bytes(order)),
            *(b"".join(slabs), len(slabs), batches, request.patience),
        )
        if not made:
            raise Internal("a block is not in the chunk map that the mover was given")
        return int(made)

    def status(self) -> PlanStatus:
        """Read the progress of the plan, and the memory pressure of its programs."""
        found = (ctypes.c_uint32 * 5)()
        _library().phos_plan_look(self._order, found)
        return PlanStatus(*found)

    def claim(self, batch: int, most: int) -> tuple[list[Chunk], list[Chunk]]:
        """Claim chunks. Returns all of them, by address, and those that are in shadow slots."""
        count = _library().phos_plan_claim(self._order, batch, most, self._claims)
        claims = sorted(_CLAIM.iter_unpack(self._claims.raw[: _CLAIM.size * count]))
        chunks = [Chunk(self._keys[b], i, at, length) for at, b, i, length, _ in claims]
        shadows = [chunk for chunk, claim in zip(chunks, claims, strict=True) if claim[-1]]
        return chunks, shadows

    def arrived(self, batch: int) -> None:
        """Mark the chunks of a batch saved: their bytes are safe. May be called on any thread."""
        _library().phos_plan_arrived(self._order, batch)

    def wait(self, seconds: float) -> None:
        """Wait until something is posted, for at most ``seconds``."""
        _library().phos_plan_wait(self._order, seconds)

    def abort(self) -> None:
        """Tell the hooks that no chunk is needed any more."""
        _library().phos_plan_abort(self._order)

    def freed_first(self) -> None:
        """Save the blocks that programs have freed before all others, from now on."""
        _library().phos_plan_freed_first(self._order)

    def droppable(self, *, everything: bool = False) -> tuple[bool, list[int]]:
        """Return the keys of freed blocks that are saved, and of released slabs; each only once.

        The first value is whether these are all, so that every freed block is saved. ``everything``
        also returns freed blocks that are not saved, and all slabs.
        """
        blocks = (ctypes.c_uint32 * len(self._keys))()
        slabs = (ctypes.c_uint32 * len(self._slabs))()
        counts = (ctypes.c_uint32 * 2)()
        to = [ctypes.byref(counts, 4 * i) for i in range(2)]
        complete = _library().phos_plan_droppable(
            self._order, everything, blocks, to[0], slabs, to[1]
        )
        keys = [self._keys[b] for b in blocks[: counts[0]]]
        return bool(complete), keys + [self._slabs[s] for s in slabs[: counts[1]]]

    def answer(self) -> None:
        """Tell the hooks that the memory pressure they reported was answered."""
        _library().phos_plan_answer(self._order)

    def saving(self) -> tuple[float, float]:
        """Return the seconds from a batch's claim until it is marked saved: median, longest."""
        found = (ctypes.c_uint64 * 2)()
        _library().phos_plan_saving(self._order, found)
        return found[0] / 1e9, found[1] / 1e9

    def close(self) -> None:
        """Unmap the chunk maps. No batch may be in flight."""
        if self._order:
            _library().phos_plan_close(self._order)
            self._order = 0
        for view in self._views:
            view.close()
        self._views.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(drained: DrainedBlock, block: GpuBlock) -> None:
    count = len(block.chunks)
    if len(drained.wanted) != count or len(drained.order) not in (0, 4 * count):
        raise Internal(f"block {drained.key} has {count} chunks, not {len(drained.wanted)}")


@functools.cache
def _library() -> ctypes.CDLL:
    found = chunk_map.library()
    pointer, number, text = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_char_p
    blocks, slabs = (text, number, text, text), (text, number)
    for name, result, arguments in (
        ("create", pointer, (pointer, text, number, *blocks, *slabs, number, ctypes.c_double)),
        ("close", None, (pointer,)),
        ("look", None, (pointer, pointer)),
        ("claim", number, (pointer, number, number, pointer)),
        ("arrived", None, (pointer, number)),
        ("wait", None, (pointer, ctypes.c_double)),
        ("abort", None, (pointer,)),
        ("freed_first", None, (pointer,)),
        ("droppable", ctypes.c_int, (pointer, ctypes.c_int, *(pointer,) * 4)),
        ("answer", None, (pointer,)),
        ("saving", None, (pointer, pointer)),
    ):
        function = getattr(found, f"phos_plan_{name}")
        function.restype, function.argtypes = result, arguments
    return found
