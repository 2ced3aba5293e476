"""A program whose memory is drained while it runs; the test plays its hook."""

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from phosd.engine.chunk_map.chunk_map import ChunkMap
from phosd.engine.image.manifest import CHUNK, Block, Manifest, Tree
from phosd.engine.image.packs import RECORD
from phosd.engine.image.store import ImageWriter, Store
from phosd.engine.job.progress import Progress
from phosd.engine.mover.client.mover import Mover
from phosd.engine.mover.client.requests import DrainMap, DrainResult, DrainSource
from tests.node.mover import owner
from tests.node.mover.fake_hook import FakeHook
from tests.node.mover.owner import Owner
from tests.support.samples import manifest_of

SLOW = "20M"
"""Bytes a second, so that a chunk takes a tenth of a second to be staged, and to be copied out."""
SLOWER = "4M"


RING = 8 * RECORD
SIZES = [3 * CHUNK, CHUNK, 6 * CHUNK, 2 * CHUNK]
DISTINCT = sum(SIZES) // CHUNK - 2
SLAB = 90
SLOTS = 4


@dataclass
class Program:
    """A program with its chunk map: blocks 1, 2, ... have keys from ``key`` on; a slab of SLOTS."""

    owner: Owner
    mover: Mover
    chunk_map: ChunkMap
    hook: FakeHook
    data: list[bytes]
    digests: dict[int, list[bytes]]
    key: int = 10
    dropped: list[int] = field(default_factory=list)
    shadows: dict[int, int] = field(default_factory=dict)
    """Slots in use, by chunk."""

    @property
    def drained(self) -> DrainMap:
        """What the mover is told."""
        places = {self.key + i: self.chunk(i) for i in range(len(SIZES))}
        return DrainMap(self.chunk_map.fd, 0, places, [self.key + SLAB])

    def chunk(self, block: int, index: int = 0) -> int:
        """The number of a chunk in the chunk map."""
        return self.chunk_map.first_chunk(1 + block) + index

    def word(self, block: int, index: int) -> int:
        """The word of a chunk."""
        return self.hook.word(self.chunk(block, index))

    def shadow(self, block: int, index: int, slot: int) -> None:
        """Copy a chunk into a slot, as the hook does before it is written."""
        with self.shadowing(block, index, slot):
            pass

    @contextlib.contextmanager
    def shadowing(self, block: int, index: int, slot: int) -> Iterator[None]:
        """Inside, the hook has not said yet that the copy was made: no drain ends so long."""
        assert self.hook.begin_shadow(self.chunk(block, index), slot)
        self.owner.copy((block, index * CHUNK), (len(SIZES), slot * CHUNK), CHUNK)
        yield
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
    ) -> DrainResult:
        """Let the mover drain the chunk map."""
        source = DrainSource([self.drained], self.digests, order or {}, audit)
        return self.mover.drain(source, writer, progress, let_go=self.dropped.extend)


def contents(seed: int = 1) -> list[bytes]:
    """Bytes for blocks of SIZES: random chunks, with equal ones and zeros among them."""
    chance = random.Random(seed)
    blocks = [chance.randbytes(size) for size in SIZES]
    zeros, first = bytes(CHUNK), blocks[0][:CHUNK]
    blocks[2] = blocks[2][:CHUNK] + zeros + zeros + first + blocks[2][4 * CHUNK :]
    return blocks


@contextlib.contextmanager
def prepared(store: Store, *, rate: str = "", fault: str = "") -> Iterator[Program]:
    """A program with everything as after ``arm``; ``rate`` and ``fault`` are the mover's alone."""
    data = contents()
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(owner.running())
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PHOS_FAULT", fault)
            if rate:
                patch.setenv("PHOS_SOFTGPU_COPY_RATE", rate)
            mover = stack.enter_context(Mover.start(0, RING, store.key))
        program = stack.enter_context(armed(process, mover, data))
        yield program


@contextlib.contextmanager
def armed(process: Owner, mover: Mover, data: list[bytes], key: int = 10) -> Iterator[Program]:
    """A chunk map for what a process has, whose blocks get the keys from ``key`` on."""
    keys = [key + i for i in range(len(data))]
    descriptors = process.create(SIZES)
    mover.adopt([(keys[i], len(d), descriptors[i]) for i, d in enumerate(data)])
    slab = mover.create([(key + SLAB, SLOTS * CHUNK)])
    process.attach(slab, [SLOTS * CHUNK])
    for fd in descriptors + slab:
        os.close(fd)
    for index, content in enumerate(data):
        process.write(index, content)
    counts = [(1 + i, size // CHUNK) for i, size in enumerate(SIZES)]
    with ChunkMap.create(counts, [(0, SLOTS)]) as chunk_map:
        hook = FakeHook(chunk_map.fd)
        yield Program(process, mover, chunk_map, hook, data, mover.digest(keys), key)
        hook.close()


def publish(writer: ImageWriter, drained: DrainResult) -> Manifest:
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


def in_order(drained: DrainResult) -> list[tuple[int, int]]:
    """(block, index) as they were claimed: the records of the one pack follow one another."""
    assert {ref.pack for refs in drained.chunks.values() for ref in refs} == {0}
    first: dict[int, tuple[int, int]] = {}
    for key, refs in drained.chunks.items():
        for index, ref in enumerate(refs):
            first.setdefault(ref.offset, (key - 10, index))
    return [chunk for _, chunk in sorted(first.items())]


@contextlib.contextmanager
def beside(action: Callable[[], DrainResult]) -> Iterator["Future[DrainResult]"]:
    """Drain on another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(action)
