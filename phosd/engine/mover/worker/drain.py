"""Draining: chunks are saved while their programs run and their hooks copy on write.

The main loop claims chunks (plan.h gives the order) and starts batches; a batch's chunks are marked
saved as soon as they lie in the staging slot, before they are hashed and written out, because a
thread of the program may wait for them. Which chunks an image needs was decided before; what stands
in a chunk map only changes when and from where a chunk is copied, and its digest decides whether
that was right.
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
_STAGING = 12
"""Batches on their way to staging slots: the program waits for what is claimed and not there.

Beside a busy program they get there together, when it is the mover's turn: after 1.7 ms (H200),
in which the bus moves five. With half as many a drain was a tenth slower."""
_PAUSE_SECONDS = 0.0005
_GIVE_UP = 3
"""The level of pressure at which the program needs all the memory."""

LetGo = Callable[[list[int]], None]
"""Tells the engine that blocks are dropped here, so that it lets go of them too."""


def drain(
    transfer: Transfer,
    request: Drain,
    descriptors: Sequence[int],
    let_go: LetGo,
    settled: Callable[[], bool],
) -> Drained:
    """Save the chunks that are wanted. ``descriptors``: of the chunk maps, then of the packs.

    ``settled`` tells whether the engine has let go of all that ``let_go`` named. When this fails,
    the chunk maps say that the job is over. Raises as :class:`CopyOut` does.
    """
    gpu, ring, target = transfer.gpu, transfer.ring, request.target
    count = len(request.chunk_maps)
    chunk_maps, packs = descriptors[:count], descriptors[count:]
    drained = _Drained(gpu, request)
    with Plan(gpu, request, chunk_maps, len(ring.slots), ring.records) as plan:
        with CopyOut(transfer, target, packs, drained.copied) as out, _or_abort(plan):
            loop = _Loop(transfer, Stripes(target), plan, out, drained)
            gave_up = not loop.run(let_go, settled)
        return drained.result(plan, gave_up=gave_up)


class _Drained:
    """What was done so far."""

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
        """What a chunk's digest was at the stop."""
        return self._digests[chunk.key][SIZE * chunk.index : SIZE * (chunk.index + 1)]

    def place(self, items: Sequence[Item], shadows: Sequence[Chunk]) -> None:
        """Note where chunks will lie, and which of them come from shadow slots."""
        self._shadows += shadows
        for item in items:
            chunk = item.chunk
            number = self._request.target.packs[item.pack][0]
            self._refs[chunk.key][chunk.index] = ChunkRef(
                self.digest(chunk).hex(), number, item.offset, chunk.length
            )
            self._bytes += chunk.length

    def copied(self, items: Sequence[Item], digests: Sequence[bytes]) -> None:
        """Compare what was saved with what there was at the stop."""
        for item, digest in zip(items, digests, strict=True):
            if digest != self.digest(item.chunk):
                self.changed.append((item.chunk.key, item.chunk.index))

    def result(self, plan: Plan, *, gave_up: bool) -> Drained:
        """The answer to the request."""
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
        """How many of the chunks that were shadowed have still not been changed."""
        keys = list({c.key: None for c in self._shadows if c.key not in self.dropped})
        now = dict(zip(keys, self._gpu.digest(keys), strict=True))
        return sum(
            now[c.key][SIZE * c.index : SIZE * (c.index + 1)] == self.digest(c)
            for c in self._shadows
            if c.key in now
        )


class _Loop:
    """Claims and starts batches until every chunk is written."""

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
        """False when the program needs its memory more than we the image.

        Ends early when a chunk has changed: nothing is worth saving then.
        """
        while not self._drained.changed:
            self._out.check()
            status = self._plan.status()
            if status.wanted >= _GIVE_UP:
                self._give_up(let_go, settled)
                return False
            if status.aborted:
                raise Timeout(
                    "a program waited too long for its memory to be saved, and goes on",
                    hint="the disk may be too slow for mode=concurrent; use mode=stop",
                )
            if status.wanted and settled():
                self._relieve(status.wanted, let_go)
            if not status.left and self._ring.free == len(self._ring.slots):
                break
            if not self._start(status):
                self._plan.wait(_PAUSE_SECONDS)
        return True

    def _start(self, status: PlanStatus) -> bool:
        """Claim and start a batch, if there is a chunk and a slot for it."""
        reserved = 0 if status.urgent else self._reserved
        if not status.left or self._ring.free <= reserved or status.staging >= _STAGING:
            return False
        stripe, room = self._stripes.next(self._ring.records)
        slot = self._ring.take()
        chunks, shadows = self._plan.claim(slot.index, room)
        if not chunks:  # what is left is being copied into shadow slots
            self._ring.give(slot)
            return False
        items = fill(stripe, chunks)
        self._out.put(slot, items, partial(self._plan.staged, slot.index))
        self._drained.place(items, shadows)
        return True

    def _relieve(self, level: int, let_go: LetGo) -> None:
        """Give memory back: released slabs and freed blocks; from level 2 save those first."""
        if level > 1:
            self._plan.freed_first()
        complete, keys = self._plan.droppable()
        if keys:
            self._drop(keys, let_go)
        elif complete or level == 1:
            self._plan.answer()

    def _give_up(self, let_go: LetGo, settled: Callable[[], bool]) -> None:
        """Give back all that the program has freed, saved or not, and every slab."""
        self._drop(self._plan.droppable(everything=True)[1], let_go)
        while not settled():
            self._out.check()
            self._plan.wait(_PAUSE_SECONDS)
        self._plan.answer()

    def _drop(self, keys: list[int], let_go: LetGo) -> None:
        self._out.wait_staged()  # they may still be read from
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
