"""Describe exported blocks and allocations, and have their movers drop them."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from phosd.engine.hook_client.link import BlockFlag, HookBlock
from phosd.engine.image.manifest import CHUNK
from phosd.engine.mover.client.mover import Mover
from phosd.errors import PhosError

SHARED = BlockFlag.EXPORTED | BlockFlag.IMPORTED
"""Flags of a block that other processes may have mapped, too."""

_keys = itertools.count()  # never reused, because a mover serves several jobs


@dataclass(frozen=True)
class ExportedBlock:
    """A block of process ``pid``, and the descriptor that keeps its memory alive.

    ``key`` is its number in the mover's protocol. If blocks of several processes are the same
    memory, they have the same key.
    """

    pid: int
    block: HookBlock
    gpu: int
    descriptor: int
    key: int

    @property
    def chunks(self) -> int:
        """The number of chunks of the block; the last may be shorter."""
        return -(-self.block.size // CHUNK)

    @property
    def host(self) -> bool:
        """Whether the memory is in the host's RAM, where ``gpu`` reaches it."""
        return bool(self.block.flags & BlockFlag.HOST_LOCATED)


@dataclass(frozen=True)
class Allocation:
    """Device memory allocated by ``mover``. ``key`` is known to that mover only."""

    mover: Mover
    key: int
    descriptor: int

    @property
    def gpu(self) -> int:
        """The ordinal of the GPU."""
        return self.mover.gpu


def distinct(blocks: Iterable[ExportedBlock]) -> list[ExportedBlock]:
    """Return the first block with each key, so that shared memory is counted once."""
    first: dict[int, ExportedBlock] = {}
    for exported in blocks:
        first.setdefault(exported.key, exported)
    return list(first.values())


def keys_by_gpu(blocks: Iterable[ExportedBlock]) -> dict[int, list[int]]:
    """Return the keys of the blocks, by GPU."""
    keys: dict[int, list[int]] = {}
    for exported in blocks:
        keys.setdefault(exported.gpu, []).append(exported.key)
    return keys


def let_go(mover: Mover, keys: Sequence[int]) -> None:
    """Ask the mover to drop blocks; a dead mover has dropped them already."""
    if_alive(mover, lambda: mover.drop(keys))


def if_alive(mover: Mover, action: Callable[[], None]) -> None:
    """Run ``action``, which undoes something in a mover, unless the mover is dead."""
    if not mover.alive:
        return
    try:
        action()
    except PhosError:
        if mover.alive:
            raise


def new_key() -> int:
    """Return a block number that no mover has seen yet."""
    return next(_keys)
