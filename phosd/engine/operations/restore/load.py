"""Load an image's bytes into device memory and hash them, before a program gets the memory."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from types import MappingProxyType

from phosd.engine.image.manifest import Block, Manifest
from phosd.engine.image.store import Image
from phosd.engine.job.progress import Beside, Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.exported import Allocation, new_key
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.loaded_memory import LoadedBlock, LoadedMemory, let_go_but
from phosd.engine.node.node import Node
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Cancelled

_FIRST_GROUP = 256 << 20
_LAST_GROUP = 4 << 30
"""Bytes of blocks that are allocated while others are loaded. Allocating takes a fifth as long, so
that from a small first group on it stays ahead.
"""
_STAY: Mapping[int, int] = MappingProxyType({})


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
        blocks = [_with_memory(manifest, block, made) for block in manifest.blocks]
        yield LoadedMemory(node.movers, node.kept_memory, blocks, kept, undo)


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
            undo.add(let_go_but, kept, mover, keys)
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


def _with_memory(
    manifest: Manifest, block: Block, made: Mapping[tuple[int, int], Allocation]
) -> LoadedBlock:
    process = manifest.processes[block.process]
    allocation = made[block.alias or (block.process, block.id)]
    return LoadedBlock(ProcessId(process.pid, process.start_time), block.id, block.size, allocation)


def _stored(manifest: Manifest) -> list[Block]:
    return [block for block in manifest.blocks if block.alias is None]
