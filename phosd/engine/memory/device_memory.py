"""The device memory of a group: a descriptor, and a mover's mapping, of each of its blocks.

The descriptor keeps a block's memory alive while the process has unmapped it. That is parking.
"""

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

from phosd.engine.chunk_map.chunk_map import ChunkMap
from phosd.engine.hook_client.free_watch import FreeWatcher
from phosd.engine.hook_client.link import BlockFlag, HookBlock, HookLink
from phosd.engine.image.manifest import CHUNK, ChunkRef
from phosd.engine.image.writer import ImageWriter, Pack
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.exported import (
    SHARED,
    Allocation,
    ExportedBlock,
    distinct,
    if_alive,
    keys_by_gpu,
    let_go,
    new_key,
)
from phosd.engine.mover.client.mover import Mover
from phosd.engine.system.kcmp import same_file
from phosd.errors import Internal, Unsupported, changed_in_the_stop


class MoverProvider(Protocol):
    """Gives the data mover of a GPU, by the node's ordinal."""

    def mover(self, gpu: int) -> Mover:
        """The running mover of ``gpu``."""


class DeviceMemory:
    """Export the blocks of a group's processes, and have the movers of their GPUs adopt them.

    ``gpus_of`` maps a pid to the node's ordinals of the devices that the process sees. Between jobs
    the processes are watched (:meth:`watch`), so that memory which the program frees is free. Safe
    to use from several threads.
    """

    def __init__(self, movers: MoverProvider, gpus_of: dict[int, list[int]]) -> None:
        self._movers = movers
        self._gpus_of = gpus_of
        self._exported: dict[tuple[int, int], ExportedBlock] = {}
        self._used: dict[int, Mover] = {}
        self._adopted: set[int] = set()
        self._packs: dict[int, list[Pack]] = {}
        self._pinned: dict[int, int] = {}
        self._watchers: dict[int, FreeWatcher] = {}
        self._put_off: list[ExportedBlock] | None = None
        self._lock = threading.RLock()
        self.dropping: Callable[[list[int]], None] | None = None
        """Called with the keys that the movers drop: copies may keep that memory, too."""
        self.touched: dict[tuple[int, int], Sequence[int]] = {}
        """By (pid, block id): in which order the chunks were written after the last stop."""

    def take(self, links: Sequence[HookLink]) -> None:
        """Export the blocks that are new, and release those that a process has freed meanwhile.

        The processes are watched from then on. With a closed gate this is exact. Blocks without a
        descriptor are left out: ``rehome`` gives them one.
        """
        self.watch_all([link for link in links if link.pid not in self._watchers])
        for link in links:
            with self._lock:
                self._take(link, link.list_blocks())

    def take_all(self, links: Sequence[HookLink]) -> None:
        """Export every block. The gates must be closed.

        Blocks that came back by an unpark and have no descriptor become the process's own first.
        """
        for link in links:
            blocks = link.list_blocks()
            exported = {block_id for pid, block_id in self._exported if pid == link.pid}
            strays = [
                block.id
                for block in blocks
                if not block.flags & BlockFlag.HAS_DESCRIPTOR and block.id not in exported
            ]
            if strays:
                link.rehome(strays)  # without the lock: it may need what the watch lets go of
                blocks = link.list_blocks()
            with self._lock:
                self._take(link, blocks)

    def watch(self, link: HookLink, chunk_map: ChunkMap) -> None:
        """Release what the process frees from now on, as ``chunk_map`` tells, which is ours now."""
        self.unwatch([link.pid])
        freed = partial(self._freed, link.pid, link.runtime_dir)
        self._watchers[link.pid] = FreeWatcher(
            link.pid, chunk_map, freed, partial(self._gone, link.pid)
        )

    def watch_all(self, links: Sequence[HookLink]) -> list[ChunkMap]:
        """Watch each process by a chunk map of its own, which is ours. Nothing may be parked."""
        chunk_maps = []
        for link in links:
            chunk_map = ChunkMap.create([], [])
            chunk_map.watch()
            try:
                link.arm(chunk_map.fd, [])
            except BaseException:
                chunk_map.close()
                raise
            self.watch(link, chunk_map)
            chunk_maps.append(chunk_map)
        return chunk_maps

    def unwatch(self, pids: Iterable[int] | None = None) -> None:
        """Watch these processes no more; all of them by default."""
        for pid in list(self._watchers if pids is None else pids):
            if watcher := self._watchers.pop(pid, None):
                watcher.end()

    @property
    def watched(self) -> bool:
        """Whether it is known of every process what it frees, so that its memory may be kept."""
        return all(pid in self._watchers and self._watchers[pid].alive for pid in self._gpus_of)

    def revive(self) -> None:
        """Have blocks whose mover has died adopted by the mover that came after it."""
        with self._lock:
            for gpu, mover in list(self._used.items()):
                if not mover.alive:
                    del self._used[gpu]
                    self._adopted -= {
                        exported.key for exported in self._exported.values() if exported.gpu == gpu
                    }
            self._adopt(
                exported
                for exported in self._exported.values()
                if exported.key not in self._adopted
            )

    @contextlib.contextmanager
    def drops_put_off(self) -> Iterator[None]:
        """Keep in the movers what the program frees inside: they still work on it.

        Tell :meth:`dropped` which of these blocks they drop by themselves.
        """
        with self._lock:
            self._put_off = []
        try:
            yield
        finally:
            with self._lock:
                late, self._put_off = self._put_off, None
                self._drop(late)
                for watcher in self._watchers.values():
                    watcher.settle()

    def dropped(self, keys: Iterable[int]) -> None:
        """Forget blocks that their programs freed and that a mover has dropped by itself."""
        gone = set(keys)
        with self._lock:
            self._let_go([at for at, exported in self._exported.items() if exported.key in gone])
            if self._put_off is not None:
                self._put_off = [exported for exported in self._put_off if exported.key not in gone]

    def move(
        self, allocations: Mapping[int, Allocation], gpus: Mapping[int, int]
    ) -> list[ExportedBlock]:
        """Replace the memory of the blocks with these keys, because their processes are on other
        GPUs now: ``gpus`` maps the old ordinals to the new ones.

        Returns the blocks with their former memory, which is the caller's to release.
        """
        with self._lock:
            before = [
                exported for exported in self._exported.values() if exported.key in allocations
            ]
            for exported in before:
                allocation = allocations[exported.key]
                self._exported[exported.pid, exported.block.id] = ExportedBlock(
                    exported.pid,
                    exported.block,
                    allocation.gpu,
                    os.dup(allocation.descriptor),
                    allocation.key,
                )
                self._used[allocation.gpu] = allocation.mover
                self._adopted.add(allocation.key)
            self._adopted -= allocations.keys()
            self._gpus_of = {
                pid: [gpus.get(gpu, gpu) for gpu in known] for pid, known in self._gpus_of.items()
            }
            return before

    def hold(self, link: HookLink, allocations: Mapping[int, Allocation]) -> None:
        """Add blocks of a process that its movers know already, by block id."""
        with self._lock:
            for block in link.list_blocks():
                if (allocation := allocations.get(block.id)) is not None:
                    fd = os.dup(allocation.descriptor)
                    exported = ExportedBlock(link.pid, block, allocation.gpu, fd, allocation.key)
                    self._exported[link.pid, block.id] = exported
                    self._adopted.add(allocation.key)
                    self._used[allocation.gpu] = allocation.mover

    def of(self, pid: int) -> list[ExportedBlock]:
        """The blocks of one process, in order of id."""
        return [exported for exported in self.all() if exported.pid == pid]

    def all(self) -> list[ExportedBlock]:
        """Every block, in order of process and id."""
        with self._lock:
            return [exported for _, exported in sorted(self._exported.items())]

    def duplicates(self, blocks: Iterable[ExportedBlock]) -> list[tuple[ExportedBlock, int]]:
        """Duplicate the descriptor of each block, for the caller to close. Blocks that were freed
        meanwhile are left out.
        """
        with self._lock:
            return [
                (exported, os.dup(exported.descriptor))
                for exported in blocks
                if self._exported.get((exported.pid, exported.block.id)) is exported
            ]

    def shared(self) -> list[ExportedBlock]:
        """The blocks that the programs exported or imported: other processes may write them."""
        return [exported for exported in self.all() if exported.block.flags & SHARED]

    def order(self, blocks: Iterable[ExportedBlock]) -> dict[int, Sequence[int]]:
        """The order in which chunks were written after the last stop, as far as known, by key."""
        places = {exported.key: (exported.pid, exported.block.id) for exported in blocks}
        return {key: self.touched[at] for key, at in places.items() if at in self.touched}

    def mover(self, gpu: int) -> Mover:
        """The mover that has this group's memory on a GPU."""
        with self._lock:
            return self._used.setdefault(gpu, self._movers.mover(gpu))

    def packs(self, gpu: int) -> list[Pack]:
        """The packs that are ready for a GPU's chunks; each may be used once."""
        return self._packs.pop(gpu, [])

    def gpus(self, links: Sequence[HookLink]) -> set[int]:
        """Return the GPUs on which the processes have blocks. They may run."""
        return set(self._chunks_by_gpu(links))

    def prepare_packs(self, links: Sequence[HookLink], writer: ImageWriter) -> None:
        """Prepare and pin packs for all blocks of the processes, while they still run. Call it with
        a turn to copy: it may be as much host memory as the processes have device memory.
        """
        for gpu, count in self._chunks_by_gpu(links).items():
            self._packs[gpu] = writer.packs(count)
            self._pinned[gpu] = self.mover(gpu).pin(self._packs[gpu])

    def unpin(self) -> None:
        """Release the packs, when the program runs again."""
        with Undo() as each:
            for gpu, pinned in self._pinned.items():
                each.add(if_alive, self._used[gpu], partial(self._used[gpu].unpin, pinned))
            self._packs.clear()
            self._pinned.clear()

    def movers(self) -> list[Mover]:
        """The movers that have blocks."""
        return [self._used[gpu] for gpu in sorted({exported.gpu for exported in self.all()})]

    def digest(self, blocks: Iterable[ExportedBlock] | None = None) -> dict[int, list[bytes]]:
        """Hash every chunk of some blocks, by default of all, on all GPUs at once; by key."""
        by_gpu = keys_by_gpu(distinct(self.all() if blocks is None else blocks))
        if not by_gpu:
            return {}
        with ThreadPoolExecutor(len(by_gpu)) as pool:
            answers = pool.map(lambda item: self._used[item[0]].digest(item[1]), by_gpu.items())
            return {key: digests for answer in answers for key, digests in answer.items()}

    def gpus_of(self, pid: int) -> Sequence[int]:
        """The node's ordinals of the devices that a process sees."""
        return tuple(self._gpus_of[pid])

    def save(
        self,
        digests: dict[int, list[bytes]],
        writer: ImageWriter,
        progress: Progress,
        *,
        prepared: bool = True,
    ) -> dict[int, tuple[ChunkRef, ...]]:
        """Copy the blocks of ``digests`` into the image; returns the chunks of each, by key.

        They fill the ``prepared`` packs, or else new ones.

        Raises :class:`MisSpeculation` when saved bytes are not those that were hashed.
        """
        chunks: dict[int, tuple[ChunkRef, ...]] = {}
        blocks = distinct(exported for exported in self.all() if exported.key in digests)
        for gpu, keys in keys_by_gpu(blocks).items():
            wanted = {key: digests[key] for key in keys}
            packs = self.packs(gpu) if prepared else []
            saved = self._used[gpu].save(wanted, writer, progress, packs)
            if saved.changed:
                raise changed_in_the_stop(len(saved.changed), gpu)
            chunks |= saved.chunks
        return chunks

    def close(self) -> None:
        """Release everything."""
        self.unwatch()
        with Undo() as undo, self._lock:
            undo.add(self._let_go, list(self._exported))
            self.unpin()

    def _take(self, link: HookLink, blocks: Sequence[HookBlock]) -> None:
        self._keep_only(link.pid, blocks)
        self._let_go([(link.pid, block.id) for block in blocks if self._changed(link.pid, block)])
        wanted = [
            block.id
            for block in blocks
            if block.flags & BlockFlag.HAS_DESCRIPTOR and (link.pid, block.id) not in self._exported
        ]
        if wanted:
            self._adopt(self._export(link, wanted[0] - 1))

    def _keep_only(self, pid: int, blocks: Iterable[HookBlock]) -> None:
        alive = {(pid, block.id) for block in blocks}
        self._let_go([k for k in self._exported if k[0] == pid and k not in alive])

    def _changed(self, pid: int, block: HookBlock) -> bool:
        """Whether the program has begun to share the block, or mapped more of it, since it was
        taken: which other processes have that memory only a later export can tell.
        """
        exported = self._exported.get((pid, block.id))
        return exported is not None and (
            exported.block.flags & SHARED != block.flags & SHARED
            or exported.block.size != block.size
        )

    def _freed(self, pid: int, runtime_dir: Path, ids: Sequence[int] | None) -> bool:
        """Release blocks that the process has freed, all that are gone without ``ids``. Returns
        whether their memory is free now.
        """
        if ids is None:
            with HookLink(pid, runtime_dir) as link, self._lock:
                self._keep_only(pid, link.list_blocks())
                return self._put_off is None
        with self._lock:
            self._let_go([(pid, i) for i in ids if (pid, i) in self._exported])
            return self._put_off is None

    def _gone(self, pid: int) -> None:
        with self._lock:
            self._let_go([k for k in self._exported if k[0] == pid])

    def _export(self, link: HookLink, after: int) -> list[ExportedBlock]:
        fresh = []
        for block, descriptor in link.export_blocks(after):
            if descriptor is None:
                continue
            if (link.pid, block.id) in self._exported:
                os.close(descriptor)
                continue
            try:
                fresh.append(self._register(link.pid, block, descriptor))
            except BaseException:
                os.close(descriptor)
                raise
        return fresh

    def _chunks_by_gpu(self, links: Sequence[HookLink]) -> Counter[int]:
        chunks: Counter[int] = Counter()
        for link in links:
            for block in link.list_blocks():
                chunks[self._gpu_of(link.pid, block)] += -(-block.size // CHUNK)
        return chunks

    def _gpu_of(self, pid: int, block: HookBlock) -> int:
        """The node's ordinal of the GPU that has the block. Raises when there is none."""
        if block.flags & BlockFlag.HOST_LOCATED:
            raise Unsupported(
                f"process {pid} has VMM memory in host RAM (block {block.id})",
                hint="use mode=driver",
            )
        gpus = self._gpus_of[pid]
        if not 0 <= block.device < len(gpus):
            raise Internal(
                f"process {pid} has memory on device {block.device}, but sees {len(gpus)}",
                hint="the hook and phosd disagree; use mode=driver, and report this",
            )
        return gpus[block.device]

    def _register(self, pid: int, block: HookBlock, descriptor: int) -> ExportedBlock:
        gpu = self._gpu_of(pid, block)
        key = new_key()
        if block.flags & SHARED:
            same = (h for h in self._exported.values() if h.block.flags & SHARED)
            key = next((h.key for h in same if same_file(h.descriptor, descriptor)), key)
        exported = ExportedBlock(pid, block, gpu, descriptor, key)
        self._exported[pid, block.id] = exported
        return exported

    def _adopt(self, fresh: Iterable[ExportedBlock]) -> None:
        by_gpu: dict[int, dict[int, ExportedBlock]] = {}
        for exported in fresh:
            if exported.key not in self._adopted:
                by_gpu.setdefault(exported.gpu, {}).setdefault(exported.key, exported)
        for gpu, blocks in by_gpu.items():
            self.mover(gpu).adopt([(h.key, h.block.size, h.descriptor) for h in blocks.values()])
            self._adopted |= blocks.keys()

    def _let_go(self, which: Iterable[tuple[int, int]]) -> None:
        gone = [self._exported.pop(k) for k in which]
        still = {h.key for h in self._exported.values()}
        for exported in gone:
            os.close(exported.descriptor)
        orphans = distinct(h for h in gone if h.key in self._adopted - still)
        self._adopted -= {exported.key for exported in orphans}
        if self._put_off is None:
            self._drop(orphans)
        else:
            self._put_off += orphans

    def _drop(self, orphans: Iterable[ExportedBlock]) -> None:
        with Undo() as each:
            for gpu, keys in keys_by_gpu(orphans).items():
                each.add(let_go, self._used[gpu], keys)
                if self.dropping is not None:
                    each.add(self.dropping, keys)
