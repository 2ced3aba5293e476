"""One block that the engine has exported, and the requests to its mover about it."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from phosd.engine.hook_client.link import BlockFlag, HookBlock
from phosd.engine.image.manifest import CHUNK
from phosd.engine.mover.client.mover import Mover
from phosd.errors import PhosError

SHARED = BlockFlag.EXPORTED | BlockFlag.IMPORTED
"""The flags of a block that other processes may have mapped, too."""

_keys = itertools.count()  # a mover serves several jobs, so keys are never used twice


@dataclass(frozen=True)
class ExportedBlock:
    """One block of process ``pid``, and the descriptor that keeps its memory alive.

    ``key`` is its number in the mover's protocol; blocks of different processes that are the same
    memory have the same key.
    """

    pid: int
    block: HookBlock
    gpu: int
    descriptor: int
    key: int

    @property
    def chunks(self) -> int:
        """How many chunks the block has; the last may be shorter."""
        return -(-self.block.size // CHUNK)


@dataclass(frozen=True)
class Allocation:
    """Device memory that ``mover`` has allocated. ``key`` is known to that mover only."""

    mover: Mover
    key: int
    descriptor: int

    @property
    def gpu(self) -> int:
        """The ordinal of its GPU."""
        return self.mover.gpu


def distinct(blocks: Iterable[ExportedBlock]) -> list[ExportedBlock]:
    """The first block with each key: shared memory once."""
    first: dict[int, ExportedBlock] = {}
    for exported in blocks:
        first.setdefault(exported.key, exported)
    return list(first.values())


def keys_by_gpu(blocks: Iterable[ExportedBlock]) -> dict[int, list[int]]:
    """The keys of the blocks, by GPU."""
    keys: dict[int, list[int]] = {}
    for exported in blocks:
        keys.setdefault(exported.gpu, []).append(exported.key)
    return keys


def let_go(mover: Mover, keys: Sequence[int]) -> None:
    """Have the mover drop blocks. A dead mover has dropped them."""
    if_alive(mover, lambda: mover.drop(keys))


def if_alive(mover: Mover, action: Callable[[], None]) -> None:
    """Run ``action``, which undoes something in a mover: a dead mover needs no undoing."""
    if not mover.alive:
        return
    try:
        action()
    except PhosError:
        if mover.alive:
            raise


def new_key() -> int:
    """A number for a block that no mover has seen yet."""
    return next(_keys)
