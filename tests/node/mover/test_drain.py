"""Draining while a program runs: what is saved, in which order, and what if something fails."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.chunk_map.chunk_map import ChunkState, Phase
from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.store import Store
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.engine.mover.client import requests, rpc
from phosd.engine.mover.client.requests import DrainSource, redundant
from phosd.errors import Cancelled, Internal, OutOfSpace, PhosError, Timeout
from tests.node.mover import owner
from tests.node.mover.draining import (
    DISTINCT,
    SIZES,
    SLOW,
    SLOWER,
    Program,
    armed,
    beside,
    contents,
    in_order,
    loaded,
    prepared,
    publish,
)
from tests.support.samples import everything


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


@pytest.fixture
def program(store: Store) -> Iterator[Program]:
    with prepared(store) as made:
        yield made


def test_what_is_drained_is_what_was_there_at_the_stop(program: Program, store: Store) -> None:
    for slot, (block, index) in enumerate([(0, 1), (3, 1), (2, 5)]):
        program.shadow(block, index, slot)
    program.overwrite(0, 1)
    program.overwrite(3, 1)
    program.overwrite(2, 2)  # what an equal chunk has saved already may be written freely
    with store.begin(1000) as writer:
        assert redundant(program.digests, writer) == {12: [2, 3]}
        progress = Progress()
        progress.phase("drain")
        drained = program.drain(writer, progress, audit=True)
        made = publish(writer, drained)
    assert (drained.changed, drained.from_slots, drained.needless_shadows) == ([], 3, 1)
    assert drained.byte_count == progress.phases[0].bytes_done == DISTINCT * CHUNK
    assert 0 < drained.seconds_to_saved <= drained.longest_to_saved < 30
    assert {program.hook.word(i) for i in range(12)} == {ChunkState.SAVED}
    assert (program.hook.phase, program.dropped) == (Phase.ARMED, [])
    verify(store, made.id, Progress())
    assert loaded(program, store, made) == program.data


@pytest.mark.parametrize("shadowed", [False, True])
def test_an_unexpected_write_is_found(program: Program, store: Store, *, shadowed: bool) -> None:
    """Also one into a chunk before it was shadowed."""
    program.overwrite(2, 4)
    if shadowed:
        program.shadow(2, 4, slot=1)
    with store.begin(0) as writer:
        drained = program.drain(writer)
    assert (drained.changed, drained.chunks) == ([(12, 4)], {})
    assert program.hook.phase == Phase.ARMED
    assert everything(store.state) == set()


BY_ADDRESS = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 4), (2, 5), (3, 0), (3, 1)]


def test_what_was_written_first_last_time_is_saved_first(program: Program, store: Store) -> None:
    order = {10: [0, 0, 9], 12: [3, 0, 0, 0, 1, 0]}
    with store.begin(0) as writer:
        drained = program.drain(writer, order=order)
    first = [(2, 4), (2, 0), (0, 2)]
    assert in_order(drained) == first + [c for c in BY_ADDRESS if c not in first]


@pytest.mark.parametrize("used", [3, 4])
def test_shadows_come_last_unless_slots_are_short(
    program: Program, store: Store, used: int
) -> None:
    shadows = BY_ADDRESS[:used]
    for slot, (block, index) in enumerate(shadows):
        program.shadow(block, index, slot)
    with store.begin(0) as writer:
        found = in_order(program.drain(writer))
    rest = [c for c in BY_ADDRESS if c not in shadows]
    assert found == rest + shadows if used == 3 else found[0] in shadows
    assert sorted(found) == BY_ADDRESS


def test_freed_blocks_come_last(program: Program, store: Store) -> None:
    """Nobody writes them any more."""
    program.hook.free(1)
    with store.begin(0) as writer:
        found = in_order(program.drain(writer))
    assert found == [c for c in BY_ADDRESS if c[0]] + BY_ADDRESS[:3]


def test_an_urgent_chunk_overtakes_the_others(store: Store) -> None:
    with prepared(store, rate=SLOWER) as program, store.begin(0) as writer:
        with beside(lambda: program.drain(writer)) as running:
            assert program.hook.await_saved(program.chunk(0, 0))
            last = BY_ADDRESS[-1]
            assert program.word(*last) == ChunkState.PENDING
            program.hook.urge(program.chunk(*last))
            assert program.hook.await_saved(program.chunk(*last))
            program.overwrite(*last)
            drained = running.result()
        assert drained.changed == []
        assert in_order(drained).index(last) < len(BY_ADDRESS) - 2
        verify(store, publish(writer, drained).id, Progress())


def test_chunks_are_saved_before_they_are_written_out(store: Store) -> None:
    """A disk that hangs holds up nobody, as long as there are slots in the ring."""
    with (
        prepared(store, fault="mover-write:1:hang") as program,
        store.begin(0) as writer,
        beside(lambda: program.drain(writer)) as running,
    ):
        for chunk in BY_ADDRESS:
            assert program.hook.await_saved(program.chunk(*chunk))
        assert not running.done()
        os.kill(program.mover.pid, signal.SIGKILL)
        with pytest.raises(Internal, match="status -9"):
            running.result()


def test_a_cancelled_drain_lets_everybody_go_on(store: Store) -> None:
    with prepared(store, rate=SLOW) as program:
        progress = Progress()
        progress.phase("drain")
        progress.observer = lambda p: p.cancel() if p.phases[-1].bytes_done else None
        with (
            program.shadowing(3, 1, slot=0),
            store.begin(0) as writer,
            pytest.raises(Cancelled),
        ):
            program.drain(writer, progress)
        assert program.hook.phase == Phase.ABORTED
        assert program.word(3, 1) & 7 == ChunkState.SHADOWED
        assert program.hook.await_saved(program.chunk(3, 1), 0)
        assert everything(store.state) == set()
        assert program.mover.digest([10])[10] == program.digests[10]


def test_a_board_whose_job_is_over_is_not_drained(program: Program, store: Store) -> None:
    program.chunk_map.abort()
    with store.begin(0) as writer, pytest.raises(Timeout, match="waited too long"):
        program.drain(writer)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("mover-copy-out:3:raise", Internal),
        ("mover-write:2:raise", Internal),
        ("mover-write:2:enospc", OutOfSpace),
        ("mover-copy-out:3:kill", Internal),
        ("mover-write:2:kill", Internal),
    ],
)
def test_a_failing_drain_leaves_nothing(store: Store, fault: str, error: type[PhosError]) -> None:
    dies = fault.endswith("kill")
    with prepared(store, fault=fault) as program:
        with store.begin(0) as writer, pytest.raises(error):
            program.drain(writer)
        assert everything(store.state) == set()
        assert program.mover.alive != dies
        if dies:
            program.chunk_map.abort()
        assert program.hook.phase == Phase.ABORTED
        assert program.owner.read(2) == program.data[2]
        if not dies:
            assert program.mover.digest([12])[12] == program.digests[12]


def test_a_mover_that_hangs_while_it_drains_is_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prepared(store, fault="mover-copy-out:3:hang") as program:
        monkeypatch.setattr(rpc, "SILENCE_SECONDS", 2.0)
        with store.begin(0) as writer, pytest.raises(Timeout, match="said nothing"):
            program.drain(writer)
        assert not program.mover.alive


def test_a_shadow_that_nobody_finishes_is_taken_in_the_end(
    program: Program, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program was stopped, or has died, between the copy and the word that it was made."""
    monkeypatch.setattr(requests, "TIMEOUT_SECONDS", 0.5)
    program.hook.begin_shadow(program.chunk(0, 1), 2)
    program.owner.copy((0, CHUNK), (len(SIZES), 2 * CHUNK), CHUNK)
    program.overwrite(0, 1)
    with store.begin(0) as writer:
        drained = program.drain(writer)
        assert (drained.changed, drained.from_slots) == ([], 1)
        verify(store, publish(writer, drained).id, Progress())


def test_a_program_that_dies_is_saved_all_the_same(store: Store) -> None:
    with prepared(store, rate=SLOW) as program, store.begin(0) as writer:
        with beside(lambda: program.drain(writer)) as running:
            assert program.hook.await_saved(program.chunk(0, 0))
            program.owner.kill()
            drained = running.result()
        verify(store, publish(writer, drained).id, Progress())


def test_known_chunks_are_not_copied(program: Program, store: Store) -> None:
    with store.begin(0) as writer:
        before = program.mover.save({10: program.digests[10]}, writer)
        program.overwrite(0, 0)  # saved already
        drained = program.drain(writer)
        assert drained.byte_count == (DISTINCT - 3) * CHUNK
        assert drained.chunks[10] == before.chunks[10]
        verify(store, publish(writer, drained).id, Progress())


def test_two_programs_on_one_gpu(program: Program, store: Store) -> None:
    other_data = contents(seed=2)
    with (
        owner.running() as process,
        armed(process, program.mover, other_data, key=200) as other,
        store.begin(0) as writer,
    ):
        program.shadow(2, 0, slot=0)
        other.shadow(2, 0, slot=3)
        program.overwrite(2, 0)
        other.overwrite(2, 0)
        chunk_maps = [program.drained, other.drained]
        digests = program.digests | other.digests
        drained = program.mover.drain(DrainSource(chunk_maps, digests), writer)
        assert (drained.changed, drained.from_slots) == ([], 2)
        made = publish(writer, drained)
        assert set(drained.chunks) == {10, 11, 12, 13, 200, 201, 202, 203}
        assert [other.word(b, 0) for b in range(4)] == [ChunkState.SAVED] * 4
    verify(store, made.id, Progress())


def test_other_requests_are_answered_meanwhile(store: Store) -> None:
    with prepared(store, rate=SLOW) as program, store.begin(0) as writer:
        free, _ = program.mover.free_memory()
        with beside(lambda: program.drain(writer)) as running:
            with program.shadowing(3, 1, slot=0):
                assert program.hook.await_saved(program.chunk(0, 0))
                program.mover.reserve(CHUNK)
                for fd in program.mover.create([(500, CHUNK)]):
                    os.close(fd)
                assert program.mover.free_memory()[0] == free - 2 * CHUNK
                program.mover.create_together([(501, CHUNK)])
                program.mover.fetch({501: (500, [0])})
                digests = program.mover.digest([500, 501, 12])
                assert digests[501] == digests[500]
                assert digests[12] == program.digests[12]
                program.mover.drop([500, 501])
                program.mover.unpin(program.mover.pin([]))
                with pytest.raises(Internal, match="block 12 is being copied"):
                    program.mover.drop([12])
                assert not running.done()
            assert running.result().changed == []
        program.mover.drop([12])
