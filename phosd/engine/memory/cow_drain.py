"""Save device memory by copy-on-write: shadow memory, chunk maps, and movers that drain them.

A chunk map (``chunk_map.py``) tells hook and mover which chunks are still as they were at the stop.
From :meth:`CowDrain.arm` on, before the gates open, the hooks save what the program is about to
overwrite. The movers begin when the gates are open, or while the data are still parked if shadows
cannot hold everything.
"""

import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from phosd.engine.chunk_map.chunk_map import ChunkMap, KernelRow
from phosd.engine.hook_client.link import HookLink
from phosd.engine.image.manifest import CHUNK, ChunkRef
from phosd.engine.job.checkpoint_history import KernelMark
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo, Undoing
from phosd.engine.memory.background_copy import follow, spare_memory, starved
from phosd.engine.memory.blame import blame
from phosd.engine.memory.dump import MemoryDump
from phosd.engine.memory.exported import ExportedBlock, if_alive, new_key
from phosd.engine.mover.client.requests import DrainMap, DrainResult, DrainSource
from phosd.errors import MisSpeculation, NoSuchProcess, OutOfMemory
from phosd.units import counted

_SLABS = 32
"""Pieces that the shadow memory of a device consists of, so that some can be freed early."""


@dataclass
class _ShadowSlab:
    """Shadow memory that the mover of ``gpu`` allocated for a process's ``device``.

    ``descriptor`` is -1 once it is closed.
    """

    device: int
    gpu: int
    key: int
    slots: int
    descriptor: int


@dataclass
class _Member:
    """A process: its hook, slabs and chunk map, and the blocks that no other process can write."""

    link: HookLink
    slabs: list[_ShadowSlab] = field(default_factory=list)
    blocks: list[ExportedBlock] = field(default_factory=list)
    chunk_map: ChunkMap | None = None
    armed: bool = False


class CowDrain(Undoing):
    """A concurrent copy of a group's memory into an image. The end of the context ends it.

    Call the steps in the order of their definition. ``audit`` also counts the shadows that were not
    needed.
    """

    keeps_waiting = True
    """Whether a program may wait for chunks to be saved."""

    def __init__(
        self,
        dump: MemoryDump,
        suspects: Sequence[KernelMark] = (),
        *,
        audit: bool = False,
    ) -> None:
        self._dump = dump
        self._memory = dump.memory
        self._members = [_Member(link) for link in dump.links]
        self._kernels = [KernelRow(mark.name, mark.module, suspect=True) for mark in suspects]
        self._audit = audit
        self._shared: dict[int, tuple[ChunkRef, ...]] = {}
        self._account = Progress()
        self._undo = Undo()
        self._pool = ThreadPoolExecutor(thread_name_prefix="drain")
        self._begun: Future[None] | None = None
        self._digests: dict[int, list[bytes]] = {}
        self._drains: list[Future[DrainResult]] = []
        self._started = 0.0
        self._complete = False

    def make_room(self, limit: int | None) -> None:
        """Allocate shadow memory, at most ``limit`` bytes per GPU (None: a sensible amount)."""
        for member in self._members:
            sizes: Counter[tuple[int, int]] = Counter()
            for exported in self._memory.of(member.link.pid):
                sizes[exported.block.device, exported.gpu] += exported.block.size
            for (device, gpu), size in sorted(sizes.items()):
                self._add_slabs(member, device, gpu, size if limit is None else min(size, limit))

    def settle(self, progress: Progress) -> None:
        """Save blocks that other processes may write, too (hazard 6). The gates are closed."""
        if shared := self._memory.shared():
            digests = self._memory.adopted.digest(shared)
            self._shared = self._dump.save(digests, progress, prepared=False)

    def begin(self) -> None:
        """Start hashing on other threads. All memory is parked.

        If shadows cannot hold everything, start copying, too. That slows the driver and CRIU down,
        but a program that waits for its chunks loses more.
        """
        for member in self._members:
            exported = self._memory.of(member.link.pid)
            member.blocks = [block for block in exported if block.key not in self._shared]
        self._undo.enter(self._memory.drops_put_off())
        self._undo.add(self._stop)
        self._account.phase("drain")
        self._begun = self._pool.submit(self._prepare)

    def copy(self) -> None:
        """Do nothing: copying has begun, or begins when the gates are open."""

    def arm(self) -> None:
        """Let the hooks save what the program is about to overwrite. The gates are closed."""
        assert self._begun is not None
        self._begun.result()
        for member in self._members:
            assert member.chunk_map is not None
            member.link.arm(member.chunk_map.fd, [slab.descriptor for slab in member.slabs])
            member.armed = True
            # Only hook and mover hold the slabs from now on, so the memory is freed once both
            # release it.
            self._close_slabs(member)
            self._memory.watchers.watch(member.link, member.chunk_map)

    @property
    def bytes_total(self) -> int:
        """The bytes of all chunks, including those that need no copy."""
        return sum(exported.block.size for member in self._members for exported in member.blocks)

    def finish(self, progress: Progress) -> dict[int, tuple[ChunkRef, ...]]:
        """Wait until everything is saved. Returns the chunks of each block, by key.

        Raises :class:`MisSpeculation` if saved bytes differ from those of the stop; ``progress``
        then has the kernels that may have written them.
        """
        # With slots for all chunks nothing waits for a mover, not even the gates.
        if not self._drains:
            self._copy()
        drained = follow(self._drains, self._account, progress)
        self._complete = not any(part.aborted_for_memory for part in drained)
        self._tell(progress, drained)
        if not self._complete:
            raise starved()
        if changed := sum(len(part.changed) for part in drained):
            found = blame(member.link for member in self._members)
            progress.found_suspects(found.suspects, disproved=found.disproved)
            told = "the analysis of its machine code" if found.disproved else "its arguments say"
            raise MisSpeculation(
                f"the program wrote {counted(changed, 'chunk')} that phosd did not expect it to "
                "write",
                hint=f"one of {counted(len(found.suspects), 'kernel')} writes more than {told}; "
                "use mode=recopy or mode=stop",
            )
        chunks = dict(self._shared)
        for part in drained:
            chunks |= part.chunks
        return chunks

    def _add_slabs(self, member: _Member, device: int, gpu: int, wanted: int) -> None:
        mover = self._memory.adopted.mover(gpu)
        slots = min(wanted, spare_memory(mover)) // CHUNK
        each = -(-slots // _SLABS)
        sizes = [min(each, slots - at) for at in range(0, slots, each or 1)]
        keys = [new_key() for _ in sizes]
        try:
            made = mover.create(
                [(key, size * CHUNK) for key, size in zip(keys, sizes, strict=True)]
            )
        except OutOfMemory:
            return  # a neighbour took it; chunks are then saved one by one, while writers wait
        self._undo.add(if_alive, mover, lambda: mover.drop(keys))
        self._undo.add(self._close_slabs, member)
        for key, size, descriptor in zip(keys, sizes, made, strict=True):
            member.slabs.append(_ShadowSlab(device, gpu, key, size, descriptor))

    @staticmethod
    def _close_slabs(member: _Member) -> None:
        for slab in member.slabs:
            if slab.descriptor >= 0:
                os.close(slab.descriptor)
                slab.descriptor = -1

    def _prepare(self) -> None:
        # The new chunk maps report what is freed from now on. Ending a watch takes time, which does
        # not matter on this thread.
        self._memory.watchers.unwatch(member.link.pid for member in self._members)
        blocks = [exported for member in self._members for exported in member.blocks]
        self._digests = self._memory.adopted.digest(blocks)
        for member in self._members:
            member.chunk_map = ChunkMap.create(
                [(exported.block.id, exported.chunks) for exported in member.blocks],
                [(slab.device, slab.slots) for slab in member.slabs],
                self._kernels,
            )
        slots = sum(slab.slots for member in self._members for slab in member.slabs)
        if slots < sum(exported.chunks for exported in blocks):
            self._copy()

    def _copy(self) -> None:
        self._started = time.monotonic()
        blocks = [exported for member in self._members for exported in member.blocks]
        for gpu in sorted({exported.gpu for exported in blocks}):
            here = [exported for exported in blocks if exported.gpu == gpu]
            source = DrainSource(
                [chunk_map for member in self._members if (chunk_map := _part(member, gpu))],
                {exported.key: self._digests[exported.key] for exported in here},
                self._order(here),
                self._audit,
            )
            self._drains.append(
                self._pool.submit(
                    self._memory.adopted.mover(gpu).drain,
                    source,
                    self._dump.writer,
                    self._account,
                    self._dump.packs(gpu),
                    let_go=self._memory.dropped,
                )
            )

    def _order(self, blocks: Sequence[ExportedBlock]) -> dict[int, Sequence[int]]:
        """Return the order in which chunks were written after the last stop, if known, by key."""
        known = self._memory.write_order
        places = {exported.key: (exported.pid, exported.block.id) for exported in blocks}
        return {key: known[at] for key, at in places.items() if at in known}

    def _tell(self, progress: Progress, drained: Sequence[DrainResult]) -> None:
        """Record in ``progress`` what the copying took, and what it cost the program."""
        chunk_maps = [member.chunk_map.statistics() for member in self._members if member.chunk_map]
        figures = progress.figures
        figures.drain_seconds = time.monotonic() - self._started
        figures.drain_bytes = sum(part.byte_count for part in drained)
        figures.shadowed_chunks = sum(chunk_map.shadowed_chunks for chunk_map in chunk_maps)
        if self._audit:
            figures.needless_shadows = sum(part.needless_shadows or 0 for part in drained)
        figures.submissions = sum(chunk_map.submissions for chunk_map in chunk_maps)
        figures.looked_seconds = sum(chunk_map.looked_ns for chunk_map in chunk_maps) / 1e9
        figures.look_median_seconds = (
            max(chunk_map.look_median_ns for chunk_map in chunk_maps) / 1e9
        )
        figures.look_p99_seconds = max(chunk_map.look_p99_ns for chunk_map in chunk_maps) / 1e9
        figures.look_p999_seconds = max(chunk_map.look_p999_ns for chunk_map in chunk_maps) / 1e9
        figures.look_worst_seconds = max(chunk_map.look_worst_ns for chunk_map in chunk_maps) / 1e9
        figures.waits = sum(chunk_map.waits for chunk_map in chunk_maps)
        figures.waited_seconds = sum(chunk_map.waited_ns for chunk_map in chunk_maps) / 1e9
        figures.wrong_chunks = sum(len(part.changed) for part in drained)
        for member in self._members:
            assert member.chunk_map is not None
            for exported in member.blocks:
                touched = member.chunk_map.touched(exported.block.id)
                self._memory.write_order[exported.pid, exported.block.id] = touched

    def _stop(self) -> None:
        """End all copying, shadowing and waiting. The hooks go on reporting what is freed."""
        if not self._complete:
            self._account.cancel()
        self._pool.shutdown()
        with Undo() as each:
            for member in self._members:
                each.add(self._disarm, member)

    def _disarm(self, member: _Member) -> None:
        if member.chunk_map is None:
            return
        if not member.armed:
            member.chunk_map.close()
            return
        try:
            if self._complete:
                member.chunk_map.watch()
                member.link.disarm()
                return
            member.link.forget()
        except NoSuchProcess:
            # The process has ended, or the connection was lost and the hook has disarmed itself.
            pass
        self._memory.watchers.unwatch([member.link.pid])


def _part(member: _Member, gpu: int) -> DrainMap | None:
    """Return the part of a member's chunk map on one GPU; None if it has no blocks there."""
    assert member.chunk_map is not None
    blocks = [exported for exported in member.blocks if exported.gpu == gpu]
    if not blocks:
        return None
    slabs = [slab for slab in member.slabs if slab.gpu == gpu]
    before = itertools.takewhile(lambda slab: slab.gpu != gpu, member.slabs)
    return DrainMap(
        fd=member.chunk_map.fd,
        device=blocks[0].block.device,
        blocks={
            exported.key: member.chunk_map.first_chunk(exported.block.id) for exported in blocks
        },
        slabs=[slab.key for slab in slabs],
        first_slot=sum(slab.slots for slab in before),
    )
