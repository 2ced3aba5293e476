"""Fetching: chunks of another GPU's blocks are copied straight into blocks here."""

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from phosd.engine.digest import DigestKey
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.packs import RECORD
from phosd.engine.job.progress import Progress
from phosd.engine.mover.client.mover import Mover
from phosd.errors import Cancelled, Internal
from tests.node.mover import owner
from tests.node.mover.owner import Owner

SIZES = [5 * CHUNK, 2 * CHUNK]
SOURCE, COPY, THERE = 10, 20, 30
"""What the movers call the first block on GPU 0, the one on GPU 1, and there the one on GPU 0."""


class Pair:
    """A program's blocks on GPU 0, and as many of the same sizes on GPU 1."""

    def __init__(self, program: Owner, first: Mover, second: Mover, stack: ExitStack) -> None:
        self.program, self.first, self.second = program, first, second
        chance = random.Random(7)
        descriptors = program.create(SIZES)
        for fd in descriptors:
            stack.callback(os.close, fd)
        sized = list(enumerate(zip(SIZES, descriptors, strict=True)))
        first.adopt([(SOURCE + i, size, fd) for i, (size, fd) in sized])
        second.adopt([(THERE + i, size, fd) for i, (size, fd) in sized], home=0)
        for fd in second.create([(COPY + i, size) for i, size in enumerate(SIZES)]):
            stack.callback(os.close, fd)
        for index, size in enumerate(SIZES):
            program.write(index, chance.randbytes(size))

    def fetch(self, block: int, indices: Sequence[int]) -> None:
        self.second.fetch({COPY + block: (THERE + block, indices)})

    def equal(self, block: int) -> list[int]:
        """The chunks that have the same bytes on both GPUs."""
        ours = self.second.digest([COPY + block])[COPY + block]
        theirs = self.first.digest([SOURCE + block])[SOURCE + block]
        return [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a == b]


@pytest.fixture(params=["1", "0"], ids=["peers", "no peers"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setenv("PHOS_SOFTGPU_PEERS", request.param)
    monkeypatch.setenv("PHOS_SOFTGPU_COPY_RATE", "20M")  # a fetch can be cancelled while it runs
    key = DigestKey(os.urandom(32))
    with (
        owner.running() as program,
        Mover.start(0, 8 * RECORD, key) as first,
        Mover.start(1, 8 * RECORD, key) as second,
        ExitStack() as stack,
    ):
        yield Pair(program, first, second, stack)


def test_only_what_is_asked_for_is_copied(pair: Pair) -> None:
    pair.fetch(0, [1, 2, 4])
    assert pair.equal(0) == [1, 2, 4]
    pair.fetch(0, range(5))
    pair.fetch(1, [0, 1])
    assert (pair.equal(0), pair.equal(1)) == ([0, 1, 2, 3, 4], [0, 1])
    pair.program.write(0, b"changed", 3 * CHUNK)
    assert pair.equal(0) == [0, 1, 2, 4]
    pair.fetch(0, [3])
    assert pair.equal(0) == [0, 1, 2, 3, 4]


def test_progress_tells_the_bytes(pair: Pair) -> None:
    progress = Progress()
    progress.phase("precopy")
    pair.second.fetch({COPY: (THERE, [0, 4]), COPY + 1: (THERE + 1, [1])}, progress)
    assert progress.phases[0].bytes_done == 3 * CHUNK


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        ({COPY: (THERE, [5])}, "has 5 chunks"),
        ({COPY: (THERE, [-1])}, "has 5 chunks"),
        ({COPY: (THERE + 1, [0])}, "bytes, block"),
        ({99: (THERE, [0])}, "no block 99"),
        ({COPY: (99, [0])}, "no block 99"),
    ],
)
def test_what_is_not_there_is_refused(
    pair: Pair, rows: dict[int, tuple[int, list[int]]], wrong: str
) -> None:
    with pytest.raises(Internal, match=wrong):
        pair.second.fetch(rows)
    pair.fetch(1, [0, 1])
    assert pair.equal(1) == [0, 1]


def test_a_cancelled_fetch_ends(pair: Pair) -> None:
    progress = Progress()
    progress.cancel()
    with pytest.raises(Cancelled):
        pair.second.fetch({COPY: (THERE, range(5))}, progress)


def test_memory_is_free_when_nobody_holds_it(pair: Pair, own_device: Path) -> None:
    before = pair.second.free_memory()[0]
    pair.second.drop([COPY, COPY + 1, THERE, THERE + 1])
    assert pair.second.free_memory()[0] == before + sum(SIZES)
