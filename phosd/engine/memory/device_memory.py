"""What the engine holds of a unit's device memory: a descriptor and a mover's mapping a block.

Holding a block keeps its memory alive while the process has let go of it. That is parking.
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

from phosd.engine.chunk_map.chunk_map import Board
from phosd.engine.hook_client.free_watch import Watch
from phosd.engine.hook_client.link import Block, BlockFlag, HookLink
from phosd.engine.image.manifest import CHUNK, ChunkRef
from phosd.engine.image.writer import ImageWriter, Pack
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.exported import (
    Held,
    Place,
    distinct,
    if_alive,
    keys_by_gpu,
    let_go,
    new_key,
)
from phosd.engine.mover.client.mover import Mover
from phosd.engine.system.kcmp import same_file
from phosd.errors import Internal, Unsupported, changed_in_the_stop

_SHARED = BlockFlag.EXPORTED | BlockFlag.IMPORTED


class Movers(Protocol):
    """Gives the data mover of a GPU, by the node's ordinal."""

    def mover(self, gpu: int) -> Mover:
        """The running mover of ``gpu``."""


class Holdings:
    """The blocks of a unit, adopted by the movers of their GPUs.

    ``gpus_of`` maps a pid to the node's ordinals of the devices that the process sees. What is held
    between jobs is watched (:meth:`watch`), so that memory which the program frees is free. Safe to
    use from several threads.
    """

    def __init__(self, movers: Movers, gpus_of: dict[int, list[int]]) -> None:
        self._movers = movers
        self._gpus_of = gpus_of
        self._held: dict[tuple[int, int], Held] = {}
        self._used: dict[int, Mover] = {}
        self._adopted: set[int] = set()
        self._packs: dict[int, list[Pack]] = {}
        self._pinned: dict[int, int] = {}
        self._watches: dict[int, Watch] = {}
        self._put_off: list[Held] | None = None
        self._lock = threading.RLock()
        self.dropping: Callable[[list[int]], None] | None = None
        """Told which keys the movers drop, by who has something that keeps that memory, too."""
        self.touched: dict[tuple[int, int], Sequence[int]] = {}
        """By (pid, block id): in which order the chunks were written after the last stop."""

    def take(self, links: Sequence[HookLink]) -> None:
        """Export what is not held yet, and let go of what a process has freed meanwhile.

        The processes are watched from then on. With a closed gate this is exact. Blocks without a
        descriptor are left out: ``rehome`` gives them one.
        """
        self.watch_all([link for link in links if link.pid not in self._watches])
        for link in links:
            with self._lock:
                self._take(link, link.list_blocks())

    def take_all(self, links: Sequence[HookLink]) -> None:
        """Hold every block. The gates must be closed.

        Blocks that came back by an unpark and that nobody keeps become the process's own first.
        """
        for link in links:
            blocks = link.list_blocks()
            held = {block_id for pid, block_id in self._held if pid == link.pid}
            strays = [
                block.id
                for block in blocks
                if not block.flags & BlockFlag.HAS_DESCRIPTOR and block.id not in held
            ]
            if strays:
                link.rehome(strays)  # without the lock: it may need what the watch lets go of
                blocks = link.list_blocks()
            with self._lock:
                self._take(link, blocks)

    def watch(self, link: HookLink, board: Board) -> None:
        """Let go of what the process frees from now on, as ``board`` tells, which is ours now."""
        self.unwatch([link.pid])
        freed = partial(self._freed, link.pid, link.runtime_dir)
        self._watches[link.pid] = Watch(link.pid, board, freed, partial(self._gone, link.pid))

    def watch_all(self, links: Sequence[HookLink]) -> list[Board]:
        """Watch each process by a board of its own, which is ours. Nothing is parked."""
        boards = []
        for link in links:
            board = Board.create([], [])
            board.watch()
            try:
                link.arm(board.fd, [])
            except BaseException:
                board.close()
                raise
            self.watch(link, board)
            boards.append(board)
        return boards

    def unwatch(self, pids: Iterable[int] | None = None) -> None:
        """Watch these processes no more; all of them by default."""
        for pid in list(self._watches if pids is None else pids):
            if watch := self._watches.pop(pid, None):
                watch.end()

    @property
    def watched(self) -> bool:
        """Whether it is known of every process what it frees, so that its memory may be kept."""
        return all(pid in self._watches and self._watches[pid].alive for pid in self._gpus_of)

    def revive(self) -> None:
        """Have memory adopted again whose mover has died meanwhile."""
        with self._lock:
            for gpu, mover in list(self._used.items()):
                if not mover.alive:
                    del self._used[gpu]
                    self._adopted -= {held.key for held in self._held.values() if held.gpu == gpu}
            self._adopt(held for held in self._held.values() if held.key not in self._adopted)

    @contextlib.contextmanager
    def drops_put_off(self) -> Iterator[None]:
        """Inside, the movers keep what the program frees: they are not done with it.

        Those of it that they drop by themselves :meth:`dropped` has to be told.
        """
        with self._lock:
            self._put_off = []
        try:
            yield
        finally:
            with self._lock:
                late, self._put_off = self._put_off, None
                self._drop(late)
                for watch in self._watches.values():
                    watch.settle()

    def dropped(self, keys: Iterable[int]) -> None:
        """A mover has dropped blocks that their programs freed: nothing else may hold them."""
        gone = set(keys)
        with self._lock:
            self._let_go([place for place, held in self._held.items() if held.key in gone])
            if self._put_off is not None:
                self._put_off = [held for held in self._put_off if held.key not in gone]

    def move(self, places: Mapping[int, Place], gpus: Mapping[int, int]) -> list[Held]:
        """Hold other memory for the blocks with these keys from now on, because their processes
        are on other GPUs: ``gpus`` maps the old ordinals to the new ones.

        Returns what was held instead, which is the caller's to let go of.
        """
        with self._lock:
            before = [held for held in self._held.values() if held.key in places]
            for held in before:
                place = places[held.key]
                self._held[held.pid, held.block.id] = Held(
                    held.pid, held.block, place.gpu, os.dup(place.descriptor), place.key
                )
                self._used[place.gpu] = place.mover
                self._adopted.add(place.key)
            self._adopted -= places.keys()
            self._gpus_of = {
                pid: [gpus.get(gpu, gpu) for gpu in known] for pid, known in self._gpus_of.items()
            }
            return before

    def hold(self, link: HookLink, places: Mapping[int, Place]) -> None:
        """Hold memory of a process that its movers have already, by block id."""
        with self._lock:
            for block in link.list_blocks():
                if (place := places.get(block.id)) is not None:
                    fd = os.dup(place.descriptor)
                    held = Held(link.pid, block, place.gpu, fd, place.key)
                    self._held[link.pid, block.id] = held
                    self._adopted.add(place.key)
                    self._used[place.gpu] = place.mover

    def of(self, pid: int) -> list[Held]:
        """The blocks of one process, in order of id."""
        return [held for held in self.all() if held.pid == pid]

    def all(self) -> list[Held]:
        """Every block, in order of process and id."""
        with self._lock:
            return [held for _, held in sorted(self._held.items())]

    def duplicates(self, blocks: Iterable[Held]) -> list[tuple[Held, int]]:
        """A descriptor of each block, the caller's to close; without those freed meanwhile, whose
        own is closed.
        """
        with self._lock:
            return [
                (held, os.dup(held.descriptor))
                for held in blocks
                if self._held.get((held.pid, held.block.id)) is held
            ]

    def shared(self) -> list[Held]:
        """The blocks that the programs exported or imported: somebody else may write them."""
        return [held for held in self.all() if held.block.flags & _SHARED]

    def order(self, blocks: Iterable[Held]) -> dict[int, Sequence[int]]:
        """What is known of the order in which the chunks are written, by key."""
        places = {held.key: (held.pid, held.block.id) for held in blocks}
        return {key: self.touched[at] for key, at in places.items() if at in self.touched}

    def mover(self, gpu: int) -> Mover:
        """The mover that holds this unit's memory on a GPU."""
        with self._lock:
            return self._used.setdefault(gpu, self._movers.mover(gpu))

    def packs(self, gpu: int) -> list[Pack]:
        """The packs that are ready for a GPU's chunks; each may be used once."""
        return self._packs.pop(gpu, [])

    def prepare_packs(self, links: Sequence[HookLink], writer: ImageWriter) -> set[int]:
        """Have packs ready for all that the processes hold, while they still run; on which GPUs
        that is.
        """
        chunks: Counter[int] = Counter()
        for link in links:
            for block in link.list_blocks():
                chunks[self._gpu_of(link.pid, block)] += -(-block.size // CHUNK)
        for gpu, count in chunks.items():
            self._packs[gpu] = writer.packs(count)
            self._pinned[gpu] = self.mover(gpu).pin(self._packs[gpu])
        return set(chunks)

    def unpin(self) -> None:
        """Let go of the packs, when the program runs again."""
        with Undo() as each:
            for gpu, pinned in self._pinned.items():
                each.add(if_alive, self._used[gpu], partial(self._used[gpu].unpin, pinned))
            self._packs.clear()
            self._pinned.clear()

    def movers(self) -> list[Mover]:
        """The movers that hold something."""
        return [self._used[gpu] for gpu in sorted({held.gpu for held in self.all()})]

    def digest(self, blocks: Iterable[Held] | None = None) -> dict[int, list[bytes]]:
        """The digest of every chunk of some blocks, by default of all, by key; all GPUs at once."""
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
        """Copy the blocks of ``digests`` into the image; where their chunks are, by key. Unless
        the ``prepared`` packs are for them, they get others.

        Raises :class:`MisSpeculation` when saved bytes are not those that were hashed.
        """
        chunks: dict[int, tuple[ChunkRef, ...]] = {}
        blocks = distinct(held for held in self.all() if held.key in digests)
        for gpu, keys in keys_by_gpu(blocks).items():
            wanted = {key: digests[key] for key in keys}
            packs = self.packs(gpu) if prepared else []
            saved = self._used[gpu].save(wanted, writer, progress, packs)
            if saved.changed:
                raise changed_in_the_stop(len(saved.changed), gpu)
            chunks |= saved.chunks
        return chunks

    def close(self) -> None:
        """Let go of everything."""
        self.unwatch()
        with Undo() as undo, self._lock:
            undo.add(self._let_go, list(self._held))
            self.unpin()

    def _take(self, link: HookLink, blocks: Sequence[Block]) -> None:
        self._keep_only(link.pid, blocks)
        self._let_go([(link.pid, block.id) for block in blocks if self._changed(link.pid, block)])
        wanted = [
            block.id
            for block in blocks
            if block.flags & BlockFlag.HAS_DESCRIPTOR and (link.pid, block.id) not in self._held
        ]
        if wanted:
            self._adopt(self._export(link, wanted[0] - 1))

    def _keep_only(self, pid: int, blocks: Iterable[Block]) -> None:
        alive = {(pid, block.id) for block in blocks}
        self._let_go([k for k in self._held if k[0] == pid and k not in alive])

    def _changed(self, pid: int, block: Block) -> bool:
        """Whether the program has begun to share the block, or mapped more of it, since it was
        taken: who else has that memory can only be told by what is exported from then on.
        """
        held = self._held.get((pid, block.id))
        return held is not None and (
            held.block.flags & _SHARED != block.flags & _SHARED or held.block.size != block.size
        )

    def _freed(self, pid: int, runtime_dir: Path, ids: Sequence[int] | None) -> bool:
        """The process has freed blocks; without ids, nobody knows which. Whether nobody holds them
        any more.
        """
        if ids is None:
            with HookLink(pid, runtime_dir) as link, self._lock:
                self._keep_only(pid, link.list_blocks())
                return self._put_off is None
        with self._lock:
            self._let_go([(pid, i) for i in ids if (pid, i) in self._held])
            return self._put_off is None

    def _gone(self, pid: int) -> None:
        with self._lock:
            self._let_go([k for k in self._held if k[0] == pid])

    def _export(self, link: HookLink, after: int) -> list[Held]:
        fresh = []
        for block, descriptor in link.export_blocks(after):
            if descriptor is None:
                continue
            if (link.pid, block.id) in self._held:
                os.close(descriptor)
                continue
            try:
                fresh.append(self._hold(link.pid, block, descriptor))
            except BaseException:
                os.close(descriptor)
                raise
        return fresh

    def _gpu_of(self, pid: int, block: Block) -> int:
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

    def _hold(self, pid: int, block: Block, descriptor: int) -> Held:
        gpu = self._gpu_of(pid, block)
        key = new_key()
        if block.flags & _SHARED:
            same = (h for h in self._held.values() if h.block.flags & _SHARED)
            key = next((h.key for h in same if same_file(h.descriptor, descriptor)), key)
        held = Held(pid, block, gpu, descriptor, key)
        self._held[pid, block.id] = held
        return held

    def _adopt(self, fresh: Iterable[Held]) -> None:
        by_gpu: dict[int, dict[int, Held]] = {}
        for held in fresh:
            if held.key not in self._adopted:
                by_gpu.setdefault(held.gpu, {}).setdefault(held.key, held)
        for gpu, blocks in by_gpu.items():
            self.mover(gpu).adopt([(h.key, h.block.size, h.descriptor) for h in blocks.values()])
            self._adopted |= blocks.keys()

    def _let_go(self, which: Iterable[tuple[int, int]]) -> None:
        gone = [self._held.pop(k) for k in which]
        still = {h.key for h in self._held.values()}
        for held in gone:
            os.close(held.descriptor)
        orphans = distinct(h for h in gone if h.key in self._adopted - still)
        self._adopted -= {held.key for held in orphans}
        if self._put_off is None:
            self._drop(orphans)
        else:
            self._put_off += orphans

    def _drop(self, orphans: Iterable[Held]) -> None:
        with Undo() as each:
            for gpu, keys in keys_by_gpu(orphans).items():
                each.add(let_go, self._used[gpu], keys)
                if self.dropping is not None:
                    each.add(self.dropping, keys)
