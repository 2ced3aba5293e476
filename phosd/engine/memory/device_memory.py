"""Hold the device memory of a group: a descriptor and a mover's mapping of each block.

The descriptor keeps a block's memory alive while the process has unmapped it, that is, parked it.
"""

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from phosd.engine.hook_client.link import BlockFlag, HookBlock, HookLink
from phosd.engine.memory.adopted import AdoptedBlocks, MoverProvider
from phosd.engine.memory.exported import SHARED, Allocation, ExportedBlock, distinct, new_key
from phosd.engine.memory.free_watchers import FreeWatchers
from phosd.engine.memory.handing_back import HeldBlock
from phosd.engine.memory.visible_gpus import VisibleGpus
from phosd.engine.mover.client.mover import Mover
from phosd.engine.system.kcmp import same_file
from phosd.errors import Busy, Internal

_WRITTEN = 32
"""One of so many equal chunks is expected to differ at the stop: the program runs on, and samples
miss a chunk of which it has written little.
"""


class DeviceMemory:
    """Export the blocks of a group's processes, and have the movers of their GPUs adopt them.

    ``gpus_of`` maps a pid to the node's ordinals of the devices that the process sees. Between jobs
    ``watchers`` watch the processes, so that memory which a program frees is really freed. Safe to
    use from several threads.
    """

    def __init__(self, movers: MoverProvider, gpus_of: Mapping[int, Sequence[int]]) -> None:
        self._lock = threading.RLock()
        self._exported: dict[tuple[int, int], ExportedBlock] = {}
        self._listed: dict[int, set[int]] = {}
        """The ids of the blocks that each process has, as far as is known."""
        self.gpus = VisibleGpus(gpus_of)
        self.adopted = AdoptedBlocks(movers, self._lock)
        self.watchers = FreeWatchers(gpus_of.keys(), self._freed, self._ended)
        self.write_order: dict[tuple[int, int], Sequence[int]] = {}
        """The order in which chunks were written after the last stop, by (pid, block id)."""

    def take(self, links: Sequence[HookLink]) -> None:
        """Export new blocks, and release blocks that a process freed meanwhile.

        Watches the processes from then on. The result is exact if the gates are closed. Blocks
        without a descriptor are left out; ``rehome`` gives them one.
        """
        self.watchers.watch_new(links)
        unknown = []
        for link in links:
            with self._lock:
                if not self._take(link, link.list_blocks()):
                    unknown.append(link)
        for link in unknown:  # by now all have said what they have
            with self._lock:
                self._take(link, link.list_blocks())

    def take_all(self, links: Sequence[HookLink]) -> None:
        """Export every block. The gates must be closed.

        Blocks that are imports after an unpark and have no descriptor are first copied into memory
        that the process owns. Raises :class:`Busy` for an import of which nothing is known yet.
        """
        unknown = []
        for link in links:
            blocks = link.list_blocks()
            exported = {block_id for pid, block_id in self._exported if pid == link.pid}
            strays = [
                block.id
                for block in blocks
                if not block.flags & BlockFlag.HAS_DESCRIPTOR and block.id not in exported
            ]
            if strays:
                # Without the lock: the hook may need memory that the watch thread releases.
                link.rehome(strays)
                blocks = link.list_blocks()
            with self._lock:
                if not self._take(link, blocks):
                    unknown.append((link, blocks))
        for link, blocks in unknown:
            with self._lock:
                if not self._take(link, blocks):
                    raise Busy(
                        f"process {link.pid} has imported device memory that nobody else has, and "
                        "has not mapped it yet",
                        hint="the program goes on; try again when it has mapped or released it",
                    )

    def hold(self, link: HookLink, allocations: Mapping[int, Allocation]) -> None:
        """Add blocks of a process, by block id, that their movers have already."""
        with self._lock:
            blocks = link.list_blocks()
            for block in blocks:
                if (allocation := allocations.get(block.id)) is not None:
                    self._hold(link.pid, block, allocation)
            self._listed[link.pid] = {block.id for block in blocks}

    def move(
        self, allocations: Mapping[int, Allocation], gpus: Mapping[int, int]
    ) -> list[ExportedBlock]:
        """Replace the memory of the blocks with these keys after a move to other GPUs.

        ``gpus`` maps the old ordinals to the new ones. Returns the blocks with their former memory,
        which the caller releases.
        """
        with self._lock:
            before = [
                exported for exported in self._exported.values() if exported.key in allocations
            ]
            for exported in before:
                self._hold(exported.pid, exported.block, allocations[exported.key])
            self.adopted.forget(allocations)
            self.gpus.move(gpus)
            return before

    def replace(self, allocations: Mapping[int, Allocation]) -> None:
        """Take memory with the same bytes in the place of that of the blocks with these keys, which
        is let go of.
        """
        with self._lock:
            before = [each for each in self._exported.values() if each.key in allocations]
            for exported in before:
                self._hold(exported.pid, exported.block, allocations[exported.key])
            for exported in before:
                os.close(exported.descriptor)
            self.adopted.drop(before)

    def of(self, pid: int) -> list[ExportedBlock]:
        """Return the blocks of one process, ordered by id."""
        return [exported for exported in self.all() if exported.pid == pid]

    def all(self) -> list[ExportedBlock]:
        """Return all blocks, ordered by process and id."""
        with self._lock:
            return [exported for _, exported in sorted(self._exported.items())]

    def held(self, pid: int) -> list[HeldBlock]:
        """Return the blocks of one process as it is to get them back, ordered by id."""
        return [
            HeldBlock(each.block.id, each.block.size, each.gpu, each.key, each.descriptor)
            for each in self.of(pid)
        ]

    def not_held(self, pid: int) -> set[int]:
        """Return the ids of the blocks of a process that have no descriptor here. Raises
        :class:`Internal` for a process that was not asked what it has.
        """
        with self._lock:
            if pid not in self._listed:
                raise Internal(
                    f"it is not known what memory process {pid} has (invariant 2)",
                    hint="this is a defect of phosd",
                )
            return {number for number in self._listed[pid] if (pid, number) not in self._exported}

    def chunks_to_store(self, links: Sequence[HookLink]) -> Counter[int]:
        """Estimate how many chunks an image has to store of each GPU: of equal ones, one. The
        processes may run.
        """
        self.take(links)
        with self.drops_put_off():
            held = distinct(self.all())
            different = self.adopted.count_different(held)
        chunks = self.gpus.chunks(links)
        for gpu, count in different.items():
            total = sum(exported.chunks for exported in held if exported.gpu == gpu)
            equal = total - count
            chunks[gpu] -= equal - equal // _WRITTEN
        return +chunks

    def shared(self) -> list[ExportedBlock]:
        """Return the blocks that programs exported or imported: other processes may write them."""
        return [exported for exported in self.all() if exported.block.flags & SHARED]

    def duplicates(self, blocks: Iterable[ExportedBlock]) -> list[tuple[ExportedBlock, int]]:
        """Duplicate the descriptors of blocks for the caller to close, without freed blocks."""
        with self._lock:
            return [
                (exported, os.dup(held.descriptor))
                for exported in blocks
                if (held := self._exported.get((exported.pid, exported.block.id))) is not None
                and held.key == exported.key
            ]

    def movers(self) -> list[Mover]:
        """Return the movers that have adopted blocks."""
        return self.adopted.movers(exported.gpu for exported in self.all())

    def revive(self) -> None:
        """Ask the movers that replaced dead ones to adopt their blocks."""
        with self._lock:
            self.adopted.adopt_again(self._exported.values())

    @contextlib.contextmanager
    def drops_put_off(self) -> Iterator[None]:
        """Keep blocks that the program frees in the movers, which still work on them.

        Pass :meth:`dropped` the blocks that movers drop on their own.
        """
        with self._lock:
            self.adopted.put_off_drops()
        try:
            yield
        finally:
            with self._lock:
                self.adopted.drop_put_off()
                self.watchers.settle()

    def dropped(self, keys: Iterable[int]) -> None:
        """Forget blocks that a mover dropped on its own after their programs freed them."""
        gone = set(keys)
        with self._lock:
            self._release([at for at, exported in self._exported.items() if exported.key in gone])
            self.adopted.forget(gone)

    def close(self) -> None:
        """Release everything."""
        self.watchers.unwatch()
        with self._lock:
            self._release(list(self._exported))
            self._listed.clear()

    def _take(self, link: HookLink, blocks: Sequence[HookBlock]) -> bool:
        """Return whether all blocks were taken that can be: an import has no size before it is
        mapped, and gets that of others' block that is the same memory, once that is known.
        """
        self._keep_only(link.pid, blocks)
        self._release([(link.pid, block.id) for block in blocks if self._changed(link.pid, block)])
        for block in blocks:
            exported = self._exported.get((link.pid, block.id))
            if exported is not None and exported.block.va != block.va:
                self._exported[link.pid, block.id] = replace(exported, block=block)
        wanted = [
            block.id
            for block in blocks
            if block.flags & BlockFlag.HAS_DESCRIPTOR and (link.pid, block.id) not in self._exported
        ]
        if wanted:
            self.adopted.adopt(self._export(link, wanted[0] - 1))
        self._listed[link.pid] = {block.id for block in blocks}
        return all(
            block.size or (link.pid, block.id) in self._exported
            for block in blocks
            if block.flags & BlockFlag.HAS_DESCRIPTOR
        )

    def _keep_only(self, pid: int, blocks: Iterable[HookBlock]) -> None:
        alive = {(pid, block.id) for block in blocks}
        self._release([k for k in self._exported if k[0] == pid and k not in alive])

    def _changed(self, pid: int, block: HookBlock) -> bool:
        """Return whether the program has shared the block, or mapped more of it, since its export.

        Only a new export can then tell which other processes have that memory.
        """
        exported = self._exported.get((pid, block.id))
        return exported is not None and (
            exported.block.flags & SHARED != block.flags & SHARED
            or exported.block.size != (block.size or exported.block.size)
        )

    def _freed(self, pid: int, runtime_dir: Path, ids: Sequence[int] | None) -> bool:
        """Release the freed blocks ``ids``, or, if None, all that the process no longer lists.

        Returns whether their memory is free now.
        """
        if ids is None:
            with HookLink(pid, runtime_dir) as link, self._lock:
                self._keep_only(pid, link.list_blocks())
                return self.adopted.drops_at_once
        with self._lock:
            self._release([(pid, i) for i in ids if (pid, i) in self._exported])
            return self.adopted.drops_at_once

    def _ended(self, pid: int) -> None:
        with self._lock:
            self._release([k for k in self._exported if k[0] == pid])

    def _export(self, link: HookLink, after: int) -> list[ExportedBlock]:
        fresh = []
        for block, descriptor in link.export_blocks(after):
            if descriptor is None:
                continue
            if (link.pid, block.id) in self._exported:
                os.close(descriptor)
                continue
            try:
                exported = self._register(link.pid, block, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if exported is not None:
                fresh.append(exported)
            else:
                os.close(descriptor)
        return fresh

    def _register(self, pid: int, block: HookBlock, descriptor: int) -> ExportedBlock | None:
        gpu = self.gpus.of_block(pid, block)
        key = new_key()
        if block.flags & SHARED:
            for other in self._exported.values():
                if other.block.flags & SHARED and same_file(other.descriptor, descriptor):
                    # What is in host memory is near another GPU for another process.
                    key, gpu = other.key, other.gpu
                    break
            block = self._sized(block, key)
        if not block.size:
            return None
        exported = ExportedBlock(pid, block, gpu, descriptor, key)
        self._exported[pid, block.id] = exported
        return exported

    def _hold(self, pid: int, block: HookBlock, allocation: Allocation) -> None:
        if block.flags & SHARED:
            block = self._sized(block, allocation.key)
        fd = os.dup(allocation.descriptor)
        self._exported[pid, block.id] = ExportedBlock(
            pid, block, allocation.gpu, fd, allocation.key
        )
        self.adopted.add(allocation)

    def _sized(self, block: HookBlock, key: int) -> HookBlock:
        """Return a block with the size of the memory of this key, if it is an import without one;
        if others are, give them its size.
        """
        same = [each for each in self._exported.values() if each.key == key]
        size = block.size or max((each.block.size for each in same), default=0)
        for each in same:
            if not each.block.size:
                sized = replace(each, block=replace(each.block, size=size))
                self._exported[each.pid, each.block.id] = sized
        return replace(block, size=size)

    def _release(self, which: Iterable[tuple[int, int]]) -> None:
        gone = [self._exported.pop(k) for k in which]
        for exported in gone:  # the program has freed them, or they are exported anew
            self._listed.get(exported.pid, set()).discard(exported.block.id)
        still = {exported.key for exported in self._exported.values()}
        for exported in gone:
            os.close(exported.descriptor)
        self.adopted.drop(exported for exported in gone if exported.key not in still)
