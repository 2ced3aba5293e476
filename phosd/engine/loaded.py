"""Device memory with an image's bytes, loaded and hashed, before a program has it."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from phosd.engine.holdings import if_alive, let_go, new_key
from phosd.engine.image.manifest import Block, Manifest
from phosd.engine.image.store import Image
from phosd.engine.mover import Mover, Process
from phosd.engine.node import Node
from phosd.engine.progress import Progress
from phosd.engine.undo import Undo

_STAY: Mapping[int, int] = MappingProxyType({})


@dataclass(frozen=True)
class _Piece:
    """One block: ``process`` is its pid and start time in the manifest."""

    process: Process
    id: int
    mover: Mover
    key: int
    descriptor: int


class Memory:
    """The blocks of all processes of an image."""

    def __init__(self, pieces: list[_Piece]) -> None:
        self._pieces = pieces

    def of(self, pid: int) -> list[tuple[int, int]]:
        """The id of each block of a process, and a descriptor of the memory with its bytes."""
        return [(p.id, p.descriptor) for p in self._pieces if p.process[0] == pid]

    def guard(self) -> None:
        """Have the movers keep it for its processes, should this engine end (:meth:`Mover.guard`).

        The image's processes are those that are there.
        """
        for mover, pieces in self._by_mover().items():
            mover.guard((piece.process, piece.id, piece.key) for piece in pieces)

    def unguard(self) -> None:
        """The processes have it."""
        with Undo() as each:
            for mover, pieces in self._by_mover().items():
                processes = {piece.process for piece in pieces}
                each.add(if_alive, mover, partial(mover.unguard, processes))

    def _by_mover(self) -> dict[Mover, list[_Piece]]:
        found: dict[Mover, list[_Piece]] = {}
        for piece in self._pieces:
            found.setdefault(piece.mover, []).append(piece)
        return found


def device_bytes(manifest: Manifest, moves: Mapping[int, int] = _STAY) -> dict[int, int]:
    """The blocks of each GPU, in bytes; ``moves`` has the GPU that takes the place of another."""
    total: Counter[int] = Counter()
    for block in _stored(manifest):
        total[moves.get(block.gpu, block.gpu)] += block.size
    return dict(total)


@contextmanager
def loaded(
    node: Node, image: Image, progress: Progress, moves: Mapping[int, int] = _STAY
) -> Iterator[Memory]:
    """Device memory with the image's bytes, on its GPUs or on those that ``moves`` has for them.

    It lives on in who has mapped it. Raises :class:`ImageCorrupt`, :class:`OutOfMemory`.
    """
    manifest = image.manifest
    made: dict[tuple[int, int], tuple[Mover, int, int]] = {}
    with Undo() as undo:
        for gpu in sorted({block.gpu for block in manifest.blocks}):
            mover = node.mover(moves.get(gpu, gpu))
            blocks = {new_key(): b for b in _stored(manifest) if b.gpu == gpu}
            descriptors = mover.create([(key, block.size) for key, block in blocks.items()])
            undo.add(let_go, mover, list(blocks))
            for (key, block), descriptor in zip(blocks.items(), descriptors, strict=True):
                undo.add(os.close, descriptor)
                made[block.process, block.id] = mover, key, descriptor
            mover.load({key: block.chunks for key, block in blocks.items()}, image, progress)
        yield Memory([_piece(manifest, block, made) for block in manifest.blocks])


def _piece(
    manifest: Manifest, block: Block, made: Mapping[tuple[int, int], tuple[Mover, int, int]]
) -> _Piece:
    process = manifest.processes[block.process]
    mover, key, descriptor = made[block.alias or (block.process, block.id)]
    return _Piece((process.pid, process.start_time), block.id, mover, key, descriptor)


def _stored(manifest: Manifest) -> list[Block]:
    return [block for block in manifest.blocks if block.alias is None]
