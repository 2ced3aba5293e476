"""Load an image's bytes into device memory and hash them, before a program gets the memory."""

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from phosd.engine.criu.run.memory_handles import MemoryName
from phosd.engine.faults import Point, point
from phosd.engine.hook_client.link import HookLink, HookState
from phosd.engine.image.manifest import Block, Manifest
from phosd.engine.image.store import Image
from phosd.engine.job.progress import Beside, Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.device_memory import DeviceMemory
from phosd.engine.memory.exported import Allocation, if_alive, let_go, new_key
from phosd.engine.memory.handing_back import HeldBlock, hand_back
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.node import Node
from phosd.engine.program.process_gpus import gpus_of
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Cancelled, ImageCorrupt, Internal, PhosError

_log = logging.getLogger(__name__)
_FIRST_GROUP = 256 << 20
_LAST_GROUP = 4 << 30
"""Bytes of blocks that are allocated while others are loaded. Allocating takes a fifth as long, so
that from a small first group on it stays ahead.
"""
_STAY: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class _Piece:
    """One block of ``process``, which is identified as in the manifest."""

    process: ProcessId
    id: int
    size: int
    allocation: Allocation

    @property
    def held(self) -> HeldBlock:
        """The block as its process is to get it back."""
        memory = self.allocation
        return HeldBlock(self.id, self.size, memory.gpu, memory.key, memory.descriptor)


class LoadedMemory:
    """Device memory with the blocks of all processes of an image.

    ``kept`` collects the keys of blocks that are no longer ours to free; ``undo`` frees the others.
    """

    def __init__(self, node: Node, pieces: list[_Piece], kept: set[int], undo: Undo) -> None:
        self._node = node
        self._pieces = pieces
        self._kept = kept
        self._undo = undo
        self._guarded = False

    def belongs_to(self, ids: Mapping[int, int]) -> None:
        """Take the pids that the processes have now, by those that they were saved with."""
        self._pieces = [
            replace(each, process=each.process._replace(pid=ids[each.process.pid]))
            for each in self._pieces
        ]

    def descriptor_of(self, name: str) -> int:
        """Return the descriptor of a block, by the name of its memory
        (:class:`~phosd.engine.criu.run.memory_handles.MemoryName`). The processes have the pids
        that they were saved with.
        """
        wanted = MemoryName.parse(name)
        for piece in self._pieces:
            if wanted == MemoryName(piece.process.pid, piece.id):
                return piece.allocation.descriptor
        raise ImageCorrupt(
            f"the program had device memory open of which the image has nothing ({name})",
            hint="restore another image",
        )

    def hand_back(self, link: HookLink) -> None:
        """Ask a process to map its blocks. Raises as :func:`hand_back` does."""
        ours = [piece for piece in self._pieces if piece.process.pid == link.pid]
        if ours or link.hello().state is HookState.PARKED:  # perhaps without any block
            movers = {piece.allocation.gpu: piece.allocation.mover for piece in ours}
            hand_back(link, [piece.held for piece in ours], movers.__getitem__, self._replace)

    def guard(self) -> None:
        """Ask the movers to guard the memory, so that it outlives this process
        (:meth:`Mover.guard`).

        The processes of the image must exist.
        """
        self._guarded = True
        self._guard(self._pieces)

    @staticmethod
    def _guard(guarded: Iterable[_Piece]) -> None:
        for mover, pieces in _by_mover(guarded).items():
            mover.guard((piece.process, piece.id, piece.allocation.key) for piece in pieces)

    def unguard(self) -> None:
        """Tell the movers to stop guarding the memory, which the processes have mapped."""
        with Undo() as each:
            for mover, pieces in _by_mover(self._pieces).items():
                processes = {piece.process for piece in pieces}
                each.add(if_alive, mover, partial(mover.unguard, processes))

    def keep(self, links: Sequence[HookLink]) -> None:
        """Keep the memory for the next job, which then need not copy it in order to export it.

        Call it when the processes have mapped the memory and while their gates are closed.
        """
        processes = frozenset(filter(None, (procfs.process_id(link.pid) for link in links)))
        memory = DeviceMemory(
            self._node.movers, {link.pid: gpus_of(link.hello()) for link in links}
        )
        with self._node.kept_memory.keeping(processes, memory):
            try:
                for link in links:
                    pieces = (piece for piece in self._pieces if piece.process.pid == link.pid)
                    memory.hold(link, {piece.id: piece.allocation for piece in pieces})
            finally:  # a program may have ended by now, or not list all of its blocks
                self._kept |= {exported.key for exported in memory.all()}
            try:
                memory.watchers.watch_all(links)
            except PhosError as error:  # then it is not kept, and the next job has to copy it
                _log.warning("what a program frees will not be known: %s", error)

    def conclude(self, _: Manifest, links: Sequence[HookLink], __: Undo) -> None:
        """Let the restored program run, whose processes have mapped the memory."""
        for link in links:
            if link.hello().state is HookState.PARKED:
                raise Internal(
                    f"the memory of restored process {link.pid} is not mapped", hint="report this"
                )
        point(Point.RESTORE_OPEN)
        self.keep(links)
        for link in links:
            link.open_gate()

    def _replace(self, allocations: Mapping[int, Allocation]) -> None:
        ours = {}
        for key, new in allocations.items():
            self._undo.add(_let_go_but, self._kept, new.mover, [new.key])
            ours[key] = replace(new, descriptor=os.dup(new.descriptor))
            self._undo.add(os.close, ours[key].descriptor)
        self._pieces = [
            replace(each, allocation=ours.get(each.allocation.key, each.allocation))
            for each in self._pieces
        ]
        if self._guarded:
            keys = {new.key for new in allocations.values()}
            self._guard(piece for piece in self._pieces if piece.allocation.key in keys)
        for key, new in allocations.items():
            self._kept.add(key)
            let_go(new.mover, [key])


def _by_mover(pieces: Iterable[_Piece]) -> dict[Mover, list[_Piece]]:
    found: dict[Mover, list[_Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.allocation.mover, []).append(piece)
    return found


def device_bytes(manifest: Manifest, moves: Mapping[int, int] = _STAY) -> dict[int, int]:
    """Return the bytes of blocks on each GPU; ``moves`` maps GPUs to those that replace them."""
    total: Counter[int] = Counter()
    for block in _stored(manifest):
        total[moves.get(block.gpu, block.gpu)] += block.size
    return dict(total)


@contextmanager
def loaded(
    node: Node, image: Image, progress: Progress, moves: Mapping[int, int] = _STAY
) -> Iterator[LoadedMemory]:
    """Load the image into device memory on its GPUs, or on those that ``moves`` maps them to.

    The memory lives on in the processes that mapped it, and if it is kept. Raises
    :class:`ImageCorrupt` and :class:`OutOfMemory`.
    """
    manifest = image.manifest
    gpus = sorted({block.gpu for block in manifest.blocks})
    kept: set[int] = set()
    made: dict[tuple[int, int], Allocation] = {}
    with Undo() as undo:
        part = Beside(progress)

        def load(old: int) -> None:
            gpu = moves.get(old, old)
            mover = node.movers.mover(gpu)
            new = [(new_key(), block) for block in _stored(manifest) if block.gpu == old]
            with node.movers.turn_to_copy({gpu}, part), ThreadPoolExecutor(1) as beside:
                ours = Beside(part)
                allocation = beside.submit(_allocate, mover, new, ours, made, undo, kept)
                try:
                    plan = {key: block.chunks for key, block in new}
                    mover.load(plan, image, ours, arriving=True)
                except Cancelled:
                    allocation.result()  # its failure is the cause, and tells more
                    raise
                except BaseException:
                    ours.cancel()
                    raise
                allocation.result()

        _all_at_once(load, gpus, part)
        pieces = [_piece(manifest, block, made) for block in manifest.blocks]
        yield LoadedMemory(node, pieces, kept, undo)


def _allocate(
    mover: Mover,
    blocks: Sequence[tuple[int, Block]],
    progress: Progress,
    made: dict[tuple[int, int], Allocation],
    undo: Undo,
    kept: Collection[int],
) -> None:
    """Allocate device memory for blocks, given with their keys, and add it to ``made``; group by
    group, so that the first are loaded meanwhile. On a failure the load is cancelled. ``undo``
    frees what is not ``kept``.
    """
    try:
        for group in _groups(blocks):
            progress.check()
            keys = [key for key, _ in group]
            descriptors = mover.create(
                [(key, block.size) for key, block in group],
                host=[key for key, block in group if block.host],
            )
            undo.add(_let_go_but, kept, mover, keys)
            for (key, block), descriptor in zip(group, descriptors, strict=True):
                undo.add(os.close, descriptor)
                made[block.process, block.id] = Allocation(mover, key, descriptor)
    except BaseException:
        progress.cancel()
        raise


def _groups(blocks: Iterable[tuple[int, Block]]) -> Iterator[list[tuple[int, Block]]]:
    """Yield the blocks in groups of about :data:`_FIRST_GROUP` bytes at first, then of twice as
    many each time, up to :data:`_LAST_GROUP`.
    """
    group: list[tuple[int, Block]] = []
    size, enough = 0, _FIRST_GROUP
    for key, block in blocks:
        group.append((key, block))
        size += block.size
        if size >= enough:
            yield group
            group, size, enough = [], 0, min(2 * enough, _LAST_GROUP)
    if group:
        yield group


def _all_at_once(load: Callable[[int], None], gpus: Sequence[int], part: Progress) -> None:
    """Load several GPUs at once. At the first error, which it raises, the others are cancelled."""
    if not gpus:
        return
    with ThreadPoolExecutor(len(gpus)) as pool:
        loads = [pool.submit(load, gpu) for gpu in gpus]
        try:
            for each in as_completed(loads):
                each.result()
        except BaseException:
            part.cancel()
            raise


def _let_go_but(kept: Collection[int], mover: Mover, keys: Iterable[int]) -> None:
    let_go(mover, [key for key in keys if key not in kept])


def _piece(manifest: Manifest, block: Block, made: Mapping[tuple[int, int], Allocation]) -> _Piece:
    process = manifest.processes[block.process]
    allocation = made[block.alias or (block.process, block.id)]
    return _Piece(ProcessId(process.pid, process.start_time), block.id, block.size, allocation)


def _stored(manifest: Manifest) -> list[Block]:
    return [block for block in manifest.blocks if block.alias is None]
