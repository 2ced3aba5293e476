"""Draining while the program needs memory, and while it scribbles on its chunk map."""

import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.chunk_map.chunk_map import ChunkMap, ChunkState, Phase
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.store import Store
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.engine.mover.client import requests
from phosd.engine.mover.client.requests import DrainMap, DrainResult, DrainSource
from phosd.engine.mover.worker.drain import _Loop
from phosd.engine.mover.worker.plan import PlanStatus
from phosd.errors import Internal
from tests.node.mover.draining import (
    SIZES,
    SLAB,
    SLOTS,
    SLOW,
    SLOWER,
    Program,
    beside,
    in_order,
    prepared,
    publish,
)
from tests.support.harness import wait_until
from tests.support.samples import everything


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


@pytest.fixture
def program(store: Store) -> Iterator[Program]:
    with prepared(store) as made:
        yield made


def test_what_is_free_is_given_back_when_it_is_asked_for(store: Store) -> None:
    """A freed block that is saved, and a slab that the hook has let go of; then nothing more."""
    with prepared(store, rate=SLOW) as program, store.begin(0) as writer:
        free, _ = program.mover.free_memory()
        with beside(lambda: program.drain(writer)) as running:
            with program.shadowing(2, 5, slot=0):
                assert program.hook.await_saved(program.chunk(0, 2))
                program.hook.free(1)
                program.hook.free(3)
                program.hook.release_slab(0)
                assert program.dropped == []
                program.hook.press(1)
                assert program.hook.await_relief()
                assert sorted(program.dropped) == [10, 10 + SLAB]
                assert not running.done()
                # The program, which the test plays, still has all of it mapped.
                assert program.mover.free_memory()[0] == free
                program.hook.press(0)
            drained = running.result()
        assert sorted(drained.dropped) == [10, 10 + SLAB]
        assert len(drained.chunks[10]) == 3
        with pytest.raises(Internal, match="holds no block 10"):
            program.mover.digest([10])
        program.mover.drop([10])
        assert program.mover.digest([12])[12] == program.digests[12]
        verify(store, publish(writer, drained).id, Progress())


def test_freed_blocks_are_saved_first_when_that_is_not_enough(store: Store) -> None:
    with prepared(store, rate=SLOWER) as program, store.begin(0) as writer:
        with beside(lambda: program.drain(writer)) as running:
            assert program.hook.await_saved(program.chunk(0, 0))
            program.shadow(3, 1, slot=0)
            with program.shadowing(2, 5, slot=1):
                program.hook.free(4)
                program.hook.press(2)
                assert program.hook.await_relief()
                assert program.dropped == [13]
                assert not running.done()
            drained = running.result()
        assert (drained.changed, drained.from_slots, drained.dropped) == ([], 2, [13])
        found = in_order(drained)
        assert max(found.index((3, 0)), found.index((3, 1))) < found.index((2, 4))
        verify(store, publish(writer, drained).id, Progress())


class _Fake:
    """Everything that a drain's loop works with, when all is saved and 13 was freed just now."""

    def __init__(self) -> None:
        self.slots: list[object] = []
        self.free = 0
        self.changed: list[object] = []
        self.dropped: list[int] = []
        self.gpu = self.ring = self
        self.done: list[str] = []
        self.droppable_keys = [13]

    def check(self) -> None:
        """Nobody has cancelled."""

    def wait_left(self) -> None:
        """Nothing is on the way."""

    def wait(self, seconds: float) -> None:
        """Nothing happens."""

    def status(self) -> PlanStatus:
        wanted = 0 if "answered" in self.done else 2
        return PlanStatus(left=0, urgent=0, aborted=0, wanted=wanted, on_the_way=0)

    def freed_first(self) -> None:
        """Nothing is left to be saved."""

    def droppable(self, *, everything: bool = False) -> tuple[bool, list[int]]:
        keys, self.droppable_keys = self.droppable_keys, []
        return True, keys

    def drop_kept(self, keys: list[int]) -> None:
        self.done.append("dropped")

    def answer(self) -> None:
        self.done.append("answered")


def test_what_is_asked_for_at_the_very_end_is_given_before_it() -> None:
    fake: Any = _Fake()
    told: list[int] = []
    looks = iter((True, False, False, True))

    def settled() -> bool:
        fake.done.append("looked")
        return next(looks)

    assert _Loop(fake, fake, fake, fake, fake).run(told.extend, settled)
    assert told == fake.dropped == [13]
    assert fake.done == ["looked", "dropped", *["looked"] * 3, "answered"]


def test_a_program_that_needs_everything_gets_it(store: Store) -> None:
    """What it has freed, saved or not, and all slabs; the hook has called the job off, too."""
    with prepared(store, rate=SLOW) as program:
        with (
            store.begin(0) as writer,
            beside(lambda: program.drain(writer)) as running,
            program.shadowing(3, 1, slot=0),
        ):
            assert program.hook.await_saved(program.chunk(0, 0))
            program.hook.free(4)
            program.hook.press(3, abort=True)
            assert program.hook.await_relief()
            assert sorted(program.dropped) == [13, 10 + SLAB]
            drained = running.result()
        assert drained.aborted_for_memory
        assert (drained.chunks, drained.changed) == ({}, [])
        assert everything(store.state) == set()
        program.mover.drop([10, 11, 12, 13, 10 + SLAB])
        with pytest.raises(Internal, match="holds no block 12"):
            program.mover.digest([12])


def test_memory_that_cannot_be_let_go_of_ends_the_drain(store: Store) -> None:
    """The error is the caller's own; the mover goes on to work."""

    def fail(_: object) -> None:
        raise ValueError("cannot be closed")

    with prepared(store, rate=SLOW) as program:

        def drain() -> DrainResult:
            with store.begin(0) as writer:
                source = DrainSource([program.drained], program.digests)
                return program.mover.drain(source, writer, let_go=fail)

        with program.shadowing(2, 5, slot=0), beside(drain) as running:
            assert program.hook.await_saved(program.chunk(0, 0))
            program.hook.free(4)
            program.hook.press(2)
            with pytest.raises(ValueError, match="cannot be closed"):
                running.result()
        # The mover is told to stop; nobody waits until it has.
        wait_until(lambda: program.hook.phase == Phase.ABORTED, "the drain to end")
        assert not program.hook.await_relief(0)
        assert program.mover.digest([12])[12] == program.digests[12]


def test_more_is_freed_than_the_ring_holds(store: Store) -> None:
    with prepared(store, rate=SLOW) as program, store.begin(0) as writer:
        with beside(lambda: program.drain(writer)) as running:
            with program.shadowing(3, 1, slot=0):
                assert program.hook.await_saved(program.chunk(1, 0))
                for _ in range(1025):
                    program.hook.free(2)
                program.hook.press(1)
                assert program.hook.await_relief()
                # Nobody knows which, unless the mover looked before the ring was full.
                assert program.dropped in ([], [11])
            drained = running.result()
        verify(store, publish(writer, drained).id, Progress())


def overwriting(program: Program, slots: list[int], chance: random.Random, end: float) -> int:
    """Write chunks at random as a program under its hook does; returns how often it had to wait."""
    hook = program.hook
    waits = 0
    while time.monotonic() < end:
        block = chance.randrange(len(SIZES))
        index = chance.randrange(SIZES[block] // CHUNK)
        chunk = program.chunk(block, index)
        free = [s for s in slots if s not in program.shadows.values()]
        for held, slot in list(program.shadows.items()):
            if slot in slots and hook.word(held) & 7 == ChunkState.SAVED:
                del program.shadows[held]
        if free and hook.begin_shadow(chunk, free[0]):
            program.shadows[chunk] = free[0]
            program.owner.copy((block, index * CHUNK), (len(SIZES), free[0] * CHUNK), CHUNK)
            assert hook.end_shadow(chunk)
        elif hook.word(chunk) & 7 in (ChunkState.PENDING, ChunkState.COPYING):
            hook.urge(chunk)
            assert hook.await_saved(chunk)
            waits += 1
        program.owner.write(block, chance.randbytes(64), offset=index * CHUNK)
    return waits


@pytest.mark.parametrize("slots", [0, 1, SLOTS])
def test_a_program_that_writes_all_the_time(store: Store, slots: int) -> None:
    with prepared(store, rate=SLOW) as program, store.begin(0) as writer:
        chance = random.Random(slots)
        if slots:
            program.shadow(3, 1, slot=0)
            program.shadows[program.chunk(3, 1)] = 0
        with beside(lambda: program.drain(writer)) as running:
            waits = 0
            while not running.done():
                soon = time.monotonic() + 0.2
                waits += overwriting(program, list(range(slots)), chance, soon)
            drained = running.result()
        assert drained.changed == []
        assert (drained.from_slots > 0) == (slots > 0)
        assert waits or slots
        verify(store, publish(writer, drained).id, Progress())


def test_a_board_full_of_nonsense_ends_in_a_right_image_or_an_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words of any value, at any time: never a hang, never a wrong image, never a dead mover."""
    monkeypatch.setattr(requests, "TIMEOUT_SECONDS", 0.3)
    outcomes = set()
    with prepared(store, rate="200M") as program:
        for seed in range(6):
            chance = random.Random(seed)
            over = threading.Event()

            def scribble(chance: random.Random = chance, over: threading.Event = over) -> None:
                while not over.is_set():
                    value = chance.choice([0, 1, 2, 3, 4, 5, 7, 8, 12, 0x104, 0x304, 0xFFFFFF04])
                    program.hook.set_word(chance.randrange(12), value)

            thread = threading.Thread(target=scribble)
            thread.start()
            try:
                with store.begin(0) as writer:
                    drained = program.drain(writer)
                    outcomes.add(bool(drained.changed))
                    if not drained.changed:
                        verify(store, publish(writer, drained).id, Progress())
                        assert drained.chunks.keys() == program.digests.keys()
            finally:
                over.set()
                thread.join()
            assert program.mover.digest([12])[12] == program.digests[12]
    assert outcomes


def test_a_header_full_of_nonsense_is_refused(program: Program, store: Store) -> None:
    """Every field of the layout: magic, version, counts, size, offsets."""
    for at in (0, 8, 16, 32, 40, 48, 56, 64):
        before = os.pread(program.chunk_map.fd, 8, at)
        os.pwrite(program.chunk_map.fd, b"\xff" * 8, at)
        with store.begin(0) as writer, pytest.raises(Internal, match="opening a chunk map"):
            program.drain(writer)
        os.pwrite(program.chunk_map.fd, before, at)
    with store.begin(0) as writer:
        verify(store, publish(writer, program.drain(writer)).id, Progress())


def test_a_board_of_other_blocks_is_refused(program: Program, store: Store) -> None:
    with ChunkMap.create([(1, 3)], []) as small:
        drained = DrainMap(small.fd, 0, {12: 0})
        with store.begin(0) as writer, pytest.raises(Internal, match="not in the chunk map"):
            program.mover.drain(DrainSource([drained], program.digests), writer)
    with store.begin(0) as writer, pytest.raises(Internal, match="has 6 chunks, not 5"):
        digests = program.digests | {12: program.digests[12][:5]}
        program.mover.drain(DrainSource([program.drained], digests), writer)


def test_what_is_no_board_is_refused(program: Program, store: Store, tmp_path: Path) -> None:
    chunk_map = program.chunk_map.fd
    plain = os.memfd_create("plain")
    os.truncate(plain, 1 << 20)
    for fd in (plain, os.open(tmp_path, os.O_RDONLY)):
        os.dup2(fd, chunk_map)
        with store.begin(0) as writer, pytest.raises(Internal, match="opening a chunk map"):
            program.drain(writer)
        os.close(fd)
