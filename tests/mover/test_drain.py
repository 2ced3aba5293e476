"""Draining while a program runs: the test plays the program's hook on the board."""

import contextlib
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from phosd.engine.board import Board, ChunkState
from phosd.engine.image.manifest import CHUNK, Block, Manifest, Tree
from phosd.engine.image.packs import RECORD
from phosd.engine.image.store import ImageWriter, Store
from phosd.engine.mover import DrainBoard, Drained, Mover, redundant
from phosd.engine.progress import Progress
from phosd.engine.verify import verify
from tests.image.samples import manifest_of
from tests.mover import owner
from tests.mover.fake_hook import FakeHook
from tests.mover.owner import Owner

RING = 8 * RECORD
SIZES = [3 * CHUNK, CHUNK, 6 * CHUNK, 2 * CHUNK]
KEYS = [10, 11, 12, 13]
SLAB = 90
SLOTS = 4


@dataclass
class Program:
    """A program with its board: blocks 1, 2, ... have the keys 10, 11, ...; one slab of SLOTS."""

    owner: Owner
    mover: Mover
    board: Board
    hook: FakeHook
    data: list[bytes]
    digests: dict[int, list[bytes]]
    dropped: list[int] = field(default_factory=list)

    @property
    def drained(self) -> DrainBoard:
        """What the mover is told."""
        places = {key: self.chunk(i) for i, key in enumerate(KEYS)}
        return DrainBoard(self.board.fd, 0, places, [SLAB])

    def chunk(self, block: int, index: int = 0) -> int:
        """The number of a chunk on the board."""
        return self.board.first_chunk(1 + block) + index

    def word(self, block: int, index: int) -> int:
        """The word of a chunk."""
        return self.hook.word(self.chunk(block, index))

    def shadow(self, block: int, index: int, slot: int) -> None:
        """Copy a chunk into a slot, as the hook does before it is written."""
        assert self.hook.begin_shadow(self.chunk(block, index), slot)
        self.owner.copy((block, index * CHUNK), (len(SIZES), slot * CHUNK), CHUNK)
        assert self.hook.end_shadow(self.chunk(block, index))

    def overwrite(self, block: int, index: int) -> None:
        """Write into a chunk, as the program does."""
        at = index * CHUNK + 100
        self.owner.write(block, bytes([self.data[block][at] ^ 1]), offset=at)

    def drain(
        self,
        writer: ImageWriter,
        progress: Progress | None = None,
        order: Mapping[int, Sequence[int]] | None = None,
        *,
        audit: bool = False,
    ) -> Drained:
        """Have the mover drain the board."""
        given = ([self.drained], self.digests, order or {}, writer, progress)
        return self.mover.drain(*given, audit=audit, let_go=self.dropped.extend)


def contents(seed: int = 1) -> list[bytes]:
    """Bytes for blocks of SIZES: random chunks, with equal ones and zeros among them."""
    chance = random.Random(seed)
    blocks = [chance.randbytes(size) for size in SIZES]
    zeros, first = bytes(CHUNK), blocks[0][:CHUNK]
    blocks[2] = blocks[2][:CHUNK] + zeros + zeros + first + blocks[2][4 * CHUNK :]
    return blocks


@contextlib.contextmanager
def prepared(store: Store, ring: int = RING) -> Iterator[Program]:
    """A program with everything as after ``arm``; the mover was started in this environment."""
    data = contents()
    with owner.running() as process, Mover.start(0, ring, store.key) as mover:
        descriptors = process.create(SIZES)
        mover.adopt([(KEYS[i], len(d), descriptors[i]) for i, d in enumerate(data)])
        slab = mover.create([(SLAB, SLOTS * CHUNK)])
        process.attach(slab, [SLOTS * CHUNK])
        for fd in descriptors + slab:
            os.close(fd)
        for index, content in enumerate(data):
            process.write(index, content)
        counts = [(1 + i, size // CHUNK) for i, size in enumerate(SIZES)]
        with Board.create(counts, [(0, SLOTS)]) as board:
            hook = FakeHook(board.fd)
            program = Program(process, mover, board, hook, data, mover.digest(KEYS))
            for key, indices in redundant(program.digests).items():
                block = KEYS.index(key)
                board.mark_saved(program.chunk(block, i) for i in indices)
            yield program
            hook.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


@pytest.fixture
def program(store: Store) -> Iterator[Program]:
    with prepared(store) as made:
        yield made


def publish(writer: ImageWriter, drained: Drained) -> Manifest:
    """Publish what was drained."""
    blocks = [
        Block(0, key, key << 32, sum(c.length for c in chunks), 0, chunks)
        for key, chunks in drained.chunks.items()
    ]
    made = manifest_of(writer, blocks, [Tree(7, "criu-0", ())])
    writer.publish(made)
    return made


def loaded(program: Program, store: Store, made: Manifest) -> list[bytes]:
    """Load an image into new memory; returns what the program sees there."""
    sizes = [block.size for block in made.blocks]
    keys = [100 + block.id for block in made.blocks]
    descriptors = program.mover.create(list(zip(keys, sizes, strict=True)))
    with store.open(made.id) as image:
        plan = {k: b.chunks for k, b in zip(keys, made.blocks, strict=True)}
        program.mover.load(plan, image)
    program.owner.attach(descriptors, sizes)
    for fd in descriptors:
        os.close(fd)
    first = len(SIZES) + 1  # after the blocks and the slab
    return [program.owner.read(first + i) for i in range(len(sizes))]


def test_what_is_drained_is_what_was_there_at_the_stop(program: Program, store: Store) -> None:
    assert redundant(program.digests) == {12: [2, 3]}
    program.shadow(0, 1, slot=2)
    program.overwrite(0, 1)
    program.shadow(3, 1, slot=3)
    program.overwrite(3, 1)
    with store.begin(1000) as writer:
        progress = Progress()
        progress.phase("drain")
        drained = program.drain(writer, progress, audit=True)
        made = publish(writer, drained)
    assert (drained.changed, drained.from_slots) == ([], 2)
    assert drained.byte_count == progress.phases[0].bytes_done == sum(SIZES) - 2 * CHUNK
    assert 0 < drained.seconds_to_saved <= drained.longest_to_saved < 1
    assert all(program.hook.word(i) == ChunkState.SAVED for i in range(12))
    verify(store, made.id, Progress())
    assert loaded(program, store, made) == program.data
