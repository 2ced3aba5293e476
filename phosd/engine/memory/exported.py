"""One piece of device memory that the engine holds, and what its mover is told of it."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from phosd.engine.hook_client.link import Block
from phosd.engine.image.manifest import CHUNK
from phosd.engine.mover.client.mover import Mover
from phosd.errors import PhosError

_keys = itertools.count()  # a mover serves several jobs, so keys are never used twice


@dataclass(frozen=True)
class Held:
    """One block of process ``pid`` and the descriptor that keeps its memory.

    ``key`` is what the mover calls it; blocks of different processes that are the same memory
    have the same key.
    """

    pid: int
    block: Block
    gpu: int
    descriptor: int
    key: int

    @property
    def chunks(self) -> int:
        """How many chunks the block has; the last may be shorter."""
        return -(-self.block.size // CHUNK)


@dataclass(frozen=True)
class Place:
    """Memory that ``mover`` knows by ``key``. Another mover of its GPU does not know it."""

    mover: Mover
    key: int
    descriptor: int

    @property
    def gpu(self) -> int:
        """The ordinal of its GPU."""
        return self.mover.gpu


def distinct(blocks: Iterable[Held]) -> list[Held]:
    """One holder of each piece of memory, the first."""
    first: dict[int, Held] = {}
    for held in blocks:
        first.setdefault(held.key, held)
    return list(first.values())


def keys_by_gpu(blocks: Iterable[Held]) -> dict[int, list[int]]:
    """What the mover of each GPU calls the blocks."""
    keys: dict[int, list[int]] = {}
    for held in blocks:
        keys.setdefault(held.gpu, []).append(held.key)
    return keys


def let_go(mover: Mover, keys: Sequence[int]) -> None:
    """Have the mover drop blocks. A dead one holds nothing any more."""
    if_alive(mover, lambda: mover.drop(keys))


def if_alive(mover: Mover, action: Callable[[], None]) -> None:
    """Do something to a mover. A dead one has nothing to be undone any more."""
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
