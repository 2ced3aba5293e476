"""Hand parked processes their memory back, also where the driver does not import it.

A process that was restored on a GPU which it did not see before (with ``CUDA_VISIBLE_DEVICES``, or
on another machine) makes memory there, but imports none (hazard 58). It then makes memory of its
own, block by block, and the mover copies on the device what it held.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from phosd.engine.hook_client.link import MAX_DESCRIPTORS, HookLink, NotImportable
from phosd.engine.image.manifest import CHUNK
from phosd.engine.memory.exported import Allocation, new_key
from phosd.engine.mover.client.mover import Mover
from phosd.errors import OutOfMemory

_GROUP_BYTES = 1 << 30
"""Most bytes of the blocks that are there twice for a moment; a larger block is alone."""

Replace = Callable[[Mapping[int, Allocation]], None]
"""Takes allocations in the place of those with these keys, and lets go of the latter."""


@dataclass(frozen=True)
class HeldBlock:
    """A block that a process is to get back: its number in the hook, bytes, GPU and memory, which
    the mover of that GPU knows by ``key``.
    """

    id: int
    size: int
    gpu: int
    key: int
    descriptor: int

    @property
    def chunks(self) -> Sequence[int]:
        """The numbers of the block's chunks."""
        return range(-(-self.size // CHUNK))


def hand_back(
    link: HookLink,
    blocks: Sequence[HeldBlock],
    mover_of: Callable[[int], Mover],
    replace: Replace | None,
) -> None:
    """Hand a process these blocks back, and ask it to map all. Those that the process has made
    itself take the place of ``blocks``: ``replace`` is called once they have their bytes, with
    those of one GPU, whose mover is needed then and not before: it may be dead. Without ``replace``
    the holder of ``blocks`` is somebody else, to whom those that were made are new blocks.

    If it fails, what was handed back is not handed back again the next time. Raises as
    :meth:`HookLink.unpark` does, :class:`OutOfMemory`, and what the mover raises.
    """
    try:
        link.unpark((block.id, block.descriptor) for block in blocks)
    except NotImportable:
        away = link.away()
        for group in _groups([block for block in blocks if block.id in away]):
            mover = mover_of(group[0].gpu)
            try:
                _make(link, mover, group, replace)
            except OutOfMemory:
                if replace is None:  # what they had stays where it is
                    raise
                for block in group:
                    _make_by_way_of_the_host(link, mover, block, replace)
        link.unpark(())


def _groups(blocks: Sequence[HeldBlock]) -> Iterator[list[HeldBlock]]:
    """Yield blocks of one GPU each, few enough for one request."""
    group: list[HeldBlock] = []
    for block in sorted(blocks, key=lambda block: block.gpu):
        size = sum(each.size for each in group) + block.size
        if group and (
            group[0].gpu != block.gpu or size > _GROUP_BYTES or len(group) == MAX_DESCRIPTORS
        ):
            yield group
            group = []
        group.append(block)
    if group:
        yield group


def _make(
    link: HookLink, mover: Mover, group: Sequence[HeldBlock], replace: Replace | None
) -> None:
    ids = [block.id for block in group]
    with ExitStack() as until_replaced:
        made = []
        for block, descriptor in zip(group, link.make(ids), strict=True):
            until_replaced.callback(os.close, descriptor)
            made.append((block, Allocation(mover, new_key(), descriptor)))
        mover.adopt([(new.key, block.size, new.descriptor) for block, new in made])
        mover.fetch({new.key: (block.key, block.chunks) for block, new in made})
        # Before the process has it: otherwise a failure between the two would leave others with
        # memory that is no longer the process's.
        if replace is not None:
            replace({block.key: new for block, new in made})
        link.filled(ids, renewed=replace is None)


def _make_by_way_of_the_host(
    link: HookLink, mover: Mover, block: HeldBlock, replace: Replace
) -> None:
    """Do so with one block, which is in host memory meanwhile, as both do not fit on the GPU."""
    with ExitStack() as until_replaced:
        (descriptor,) = mover.create([(key := new_key(), block.size)], host=[key])
        until_replaced.callback(os.close, descriptor)
        mover.fetch({key: (block.key, block.chunks)})
        replace({block.key: Allocation(mover, key, descriptor)})
        there = dataclasses.replace(block, key=key, descriptor=descriptor)
        _make(link, mover, [there], replace)
