"""Drain blocks: save chunks while programs run and their hooks copy on write.

The main loop claims chunks in the order of plan.h and starts batches. A batch's chunks are marked
saved once they have left the device, before they are hashed and written, because a thread of the
program may wait for them. No kernel is run, but for an audit: the driver has just restored the
programs (hazard 47).
The chunks that an image needs were chosen before; a chunk map only changes when and from where a
chunk is copied, and the digest proves the result.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from phosd.engine.digest import SIZE
from phosd.engine.image.manifest import ChunkRef
from phosd.engine.mover.protocol.wire import Drain, Drained
from phosd.engine.mover.worker.copy_out import Chunk, CopyOut, Item, Stripes, fill
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.plan import Plan, PlanStatus
from phosd.engine.mover.worker.transfer import Transfer
from phosd.errors import Timeout

_RESERVED = 2
"""Slots of the ring kept for chunks that threads wait for, if the ring is large enough."""
_ON_THE_WAY = 4
"""Most batches on the way to the host: the program waits for claimed chunks until they are there.

They keep the bus busy; each takes it for 0.7 ms (30 MB, H200).
"""
_PAUSE_SECONDS = 0.0005
_GIVE_UP = 3
"""The level of memory pressure at which the program needs all the memory."""

LetGo = Callable[[list[int]], None]
"""Tells the engine which blocks were dropped here, so that it releases them, too."""


def drain(
    transfer: Transfer,
    request: Drain,
    descriptors: Sequence[int],
    let_go: LetGo,
    settled: Callable[[], bool],
) -> Drained:
    """Save the wanted chunks. ``descriptors``: those of the chunk maps, then of the packs.

    ``settled`` returns whether the engine has released all blocks passed to ``let_go``. On failure
    the chunk maps are set to aborted. Raises as :class:`CopyOut` does.
    """
    gpu, ring, target = transfer.gpu, transfer.ring, request.target
    count = len(request.chunk_maps)
    chunk_maps, packs = descriptors[:count], descriptors[count:]
    drained = _Drained(gpu, request)
    with Plan(gpu, request, chunk_maps, len(ring.slots), ring.records) as plan:
        with (
            CopyOut(transfer, target, packs, drained.copied, by_copy_engines=True) as out,
            _or_abort(plan),
        ):
            loop = _Loop(transfer, Stripes(target), plan, out, drained)
            gave_up = not loop.run(let_go, settled)
        return drained.result(plan, gave_up=gave_up)


class _Drained:
    """The results of a drain so far."""

    def __init__(self, gpu: Gpu, request: Drain) -> None:
        self._gpu = gpu
        self._request = request
        blocks = [block for chunk_map in request.chunk_maps for block in chunk_map.blocks]
        self._digests = {block.key: block.digests for block in blocks}
        self._refs: dict[int, list[ChunkRef | None]] = {
            block.key: [None] * len(block.wanted) for block in blocks
        }
        self._shadows: list[Chunk] = []
        self._bytes = 0
        self.dropped: list[int] = []
        self.changed: list[tuple[int, int]] = []

    def digest(self, chunk: Chunk) -> bytes:
        """Return a chunk's digest of the stop."""
        return self._digests[chunk.key][SIZE * chunk.index : SIZE * (chunk.index + 1)]

    def place(self, items: Sequence[Item], shadows: Sequence[Chunk]) -> None:
        """Record the places of chunks, and which of them come from shadow slots."""
        self._shadows += shadows
        for item in items:
            chunk = item.chunk
            number = self._request.target.packs[item.pack][0]
            self._refs[chunk.key][chunk.index] = ChunkRef(
                self.digest(chunk).hex(), number, item.offset, chunk.length
            )
            self._bytes += chunk.length

    def copied(self, items: Sequence[Item], digests: Sequence[bytes]) -> None:
        """Compare the digests of saved chunks with those of the stop."""
        for item, digest in zip(items, digests, strict=True):
            if digest != self.digest(item.chunk):
                self.changed.append((item.chunk.key, item.chunk.index))

    def result(self, plan: Plan, *, gave_up: bool) -> Drained:
        """Return the reply to the request."""
        complete = not (self.changed or gave_up)
        median, longest = plan.saving()
        return Drained(
            blocks=list(self._refs.items()) if complete else [],
            changed=sorted(self.changed),
            from_slots=len(self._shadows),
            byte_count=self._bytes,
            seconds_to_saved=median,
            longest_to_saved=longest,
            aborted_for_memory=gave_up,
            dropped=self.dropped,
            needless_shadows=self._needless() if complete and self._request.audit else None,
        )

    def _needless(self) -> int:
        """Count the shadowed chunks that still have the bytes of the stop."""
        keys = list({c.key: None for c in self._shadows if c.key not in self.dropped})
        now = dict(zip(keys, self._gpu.digest(keys), strict=True))
        return sum(
            now[c.key][SIZE * c.index : SIZE * (c.index + 1)] == self.digest(c)
            for c in self._shadows
            if c.key in now
        )


class _Loop:
    """The loop that claims and starts batches until every chunk is written."""

    def __init__(
        self, transfer: Transfer, stripes: Stripes, plan: Plan, out: CopyOut, drained: _Drained
    ) -> None:
        self._gpu = transfer.gpu
        self._ring = transfer.ring
        self._stripes = stripes
        self._plan = plan
        self._out = out
        self._drained = drained
        self._reserved = min(_RESERVED, len(self._ring.slots) // 4)

    def run(self, let_go: LetGo, settled: Callable[[], bool]) -> bool:
        """Run the loop. Returns False if it gave up because the program needs all its memory.

        Ends early if a chunk differs from the stop: nothing is worth saving then.
        """
        while not self._drained.changed:
            self._out.check()
            status = self._plan.status()
            if status.wanted >= _GIVE_UP:
                self._give(let_go, settled, everything=True)
                return False
            if status.aborted:
                raise Timeout(
                    "a program waited too long for its memory to be saved, and goes on",
                    hint="the disk may be too slow for mode=concurrent; use mode=stop",
                )
            if status.wanted and settled():
                self._relieve(status.wanted, let_go)
            if not status.left and self._ring.free == len(self._ring.slots):
                if not status.wanted:
                    break
                self._give(let_go, settled)
                continue  # it may want more at once
            if not self._start(status):
                self._plan.wait(_PAUSE_SECONDS)
        return True

    def _start(self, status: PlanStatus) -> bool:
        """Claim and start a batch, if there is a chunk and a slot for it."""
        reserved = 0 if status.urgent else self._reserved
        if not status.left or self._ring.free <= reserved or status.on_the_way >= _ON_THE_WAY:
            return False
        stripe, room = self._stripes.next(self._ring.records)
        slot = self._ring.take()
        chunks, shadows = self._plan.claim(slot.index, room)
        if not chunks:  # the rest is being copied into shadow slots
            self._ring.give(slot)
            return False
        items = fill(stripe, chunks)
        self._out.put(slot, items, partial(self._plan.arrived, slot.index))
        self._drained.place(items, shadows)
        return True

    def _relieve(self, level: int, let_go: LetGo) -> None:
        """Free released slabs and freed blocks; from level 2 on, save freed blocks first."""
        if level > 1:
            self._plan.freed_first()
        complete, keys = self._plan.droppable()
        if keys:
            self._drop(keys, let_go)
        elif complete or level == 1:
            self._plan.answer()

    def _give(
        self, let_go: LetGo, settled: Callable[[], bool], *, everything: bool = False
    ) -> None:
        """Free all that is wanted at once: released slabs and the blocks that the program has
        freed, if they are saved; or ``everything``, saved or not, and every slab.
        """
        keys = self._plan.droppable(everything=everything)[1]
        if keys:
            self._drop(keys, let_go)
        while not settled():
            self._out.check()
            self._plan.wait(_PAUSE_SECONDS)
        self._plan.answer()

    def _drop(self, keys: list[int], let_go: LetGo) -> None:
        self._out.wait_left()
        self._gpu.drop_kept(keys)
        self._drained.dropped += keys
        let_go(keys)


@contextmanager
def _or_abort(plan: Plan) -> Iterator[None]:
    try:
        yield
    except BaseException:
        plan.abort()
        raise
