"""The chunk map, held against the layout that the hook reads (chunk_map.h, through the tests' own
hook).
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from phosd.engine.chunk_map.chunk_map import (
    FREED_RING,
    ChunkMap,
    ChunkMapStatistics,
    ChunkState,
    Event,
    KernelRow,
    Phase,
)
from phosd.errors import Internal
from tests.node.mover.fake_hook import FakeHook
from tests.support.events import PATIENCE, next_event

BLOCKS = [(3, 5), (4, 1), (9, 700)]
SLABS = [(0, 16), (0, 4), (1, 32)]


@pytest.fixture
def chunk_map() -> Iterator[ChunkMap]:
    with ChunkMap.create(BLOCKS, SLABS) as made:
        yield made


@pytest.fixture
def hook(chunk_map: ChunkMap) -> Iterator[FakeHook]:
    made = FakeHook(chunk_map.fd)
    yield made
    made.close()


def test_the_hook_finds_what_the_engine_laid_out() -> None:
    kernels = [
        KernelRow("saxpy", module=7, suspect=True),
        KernelRow("saxpy", written=0b1001),
        KernelRow("äußerst", written=0),
    ]
    with ChunkMap.create(BLOCKS, SLABS, kernels) as chunk_map:
        hook = FakeHook(chunk_map.fd)
        assert hook.counts() == [3, 706, 3, 52, 3]
        assert [hook.place(block) for block, _ in BLOCKS] == [(0, 5), (5, 1), (6, 700)]
        assert [chunk_map.first_chunk(block) for block, _ in BLOCKS] == [0, 5, 6]
        assert [hook.slab(row) for row in range(3)] == SLABS
        rows = [hook.kernel(row) for row in range(3)]
        assert sorted(rows) == rows
        assert {tuple(row[1:]) for row in rows} == {(7, 1, 0), (0, 2, 9), (0, 2, 0)}
        assert sum(row[0] == KernelRow("saxpy").name_hash for row in rows) == 2
        hook.close()


def test_names_are_hashed_by_the_published_function() -> None:
    """Test vectors of FNV-1a, 64 bits."""
    assert KernelRow("").name_hash == 0xCBF29CE484222325
    assert KernelRow("a").name_hash == 0xAF63DC4C8601EC8C
    assert KernelRow("foobar").name_hash == 0x85944171F73967E8


def test_the_chunk_map_cannot_be_resized(chunk_map: ChunkMap) -> None:
    for size in (4096, 1 << 24):
        with pytest.raises(PermissionError):
            os.ftruncate(chunk_map.fd, size)


def test_what_needs_no_saving_is_saved_from_the_start(chunk_map: ChunkMap, hook: FakeHook) -> None:
    chunk_map.mark_saved([0, 4, 705])
    saved = [i for i in range(706) if hook.word(i) == ChunkState.SAVED]
    assert saved == [0, 4, 705]
    assert not hook.begin_shadow(4, 0)
    assert hook.begin_shadow(3, 9)
    assert list(chunk_map.states(3)) == [2, 0, 0, 3 | 9 << 8, 2]
    with pytest.raises(Internal, match="has no chunk 706"):
        chunk_map.mark_saved([1, 706])


def test_the_order_of_writing_is_told(chunk_map: ChunkMap, hook: FakeHook) -> None:
    for chunk in (7, 6, 705):
        hook.touch(chunk)
    assert list(chunk_map.touched(9))[:3] == [2, 1, 0]
    assert list(chunk_map.touched(9))[-1] == 3
    assert list(chunk_map.touched(3)) == [0] * 5


def test_the_hooks_counters(chunk_map: ChunkMap, hook: FakeHook) -> None:
    hook.count(1, 2, 3, 4, 5, 6)
    hook.touch(0)
    assert chunk_map.statistics() == ChunkMapStatistics(1, 2, 3, 4, 5, 6, 1, 0, 0, 0, 0)


@pytest.mark.parametrize("nanoseconds", [0, 1, 7, 8, 17, 1000, 1500, 1900, 2100, 99_999])
def test_the_median_of_looks(chunk_map: ChunkMap, hook: FakeHook, nanoseconds: int) -> None:
    for took in (*[3] * 40, *[nanoseconds] * 81, *[10**12] * 40):
        hook.look(took)
    assert chunk_map.statistics().look_median_ns == pytest.approx(nanoseconds, rel=0.0625, abs=0.5)


def test_the_slowest_looks(chunk_map: ChunkMap, hook: FakeHook) -> None:
    for took in (*[100] * 985, *[1000] * 13, 5000, 90_000):
        hook.look(took)
    said = chunk_map.statistics()
    found = (said.look_p99_ns, said.look_p999_ns, said.look_worst_ns)
    assert found == pytest.approx((1000, 5000, 90_000), rel=0.0625)


def test_phases(chunk_map: ChunkMap, hook: FakeHook) -> None:
    assert (hook.phase, chunk_map.phase) == (Phase.ARMED, Phase.ARMED)
    chunk_map.watch()
    assert (hook.phase, chunk_map.phase) == (Phase.WATCHED, Phase.WATCHED)
    chunk_map.abort()
    assert (hook.phase, chunk_map.phase) == (Phase.ABORTED, Phase.ABORTED)


def test_giving_up_wakes_everybody(chunk_map: ChunkMap, hook: FakeHook) -> None:
    hook.press(3, device=5)
    waits = [
        threading.Thread(target=lambda: results.append(hook.await_saved(4))),
        threading.Thread(target=lambda: results.append(hook.await_relief(device=5))),
    ]
    results: list[bool] = []
    for thread in waits:
        thread.start()
    time.sleep(0.1)
    assert not results
    start = time.monotonic()
    chunk_map.abort()
    for thread in waits:
        thread.join()
    assert results == [True, True]
    assert time.monotonic() - start < 5


def test_freed_blocks_are_told_until_they_are_taken(chunk_map: ChunkMap, hook: FakeHook) -> None:
    assert chunk_map.freed() == []
    hook.free(4)
    hook.free(9)
    assert next_event(chunk_map, os.getpid()) is Event.POSTED
    assert chunk_map.freed() == [4, 9]
    assert chunk_map.freed() == []
    assert not hook.await_taken(0)
    chunk_map.taken()
    assert hook.await_taken(0)
    hook.free(3)
    assert not hook.await_taken(0)
    assert chunk_map.freed() == [3]


def test_a_ring_that_runs_over_says_so(chunk_map: ChunkMap, hook: FakeHook) -> None:
    for block in range(FREED_RING - 1):
        hook.free(block)
    assert chunk_map.freed() == list(range(FREED_RING - 1))
    for block in range(FREED_RING):  # all are there, but one more may be in the writing
        hook.free(block)
    assert chunk_map.freed() is None
    hook.free(4)
    assert chunk_map.freed() == [4]
    for _ in range(5 * FREED_RING):
        hook.free(1)
    assert chunk_map.freed() is None
    chunk_map.taken()
    assert hook.await_taken(0)


def test_waiting_ends_when_something_is_posted(chunk_map: ChunkMap, hook: FakeHook) -> None:
    timer = threading.Timer(0.1, hook.urge, [3])
    timer.start()
    assert next_event(chunk_map, os.getpid()) is Event.POSTED
    timer.join()


def test_waiting_ends_when_it_is_told_to(chunk_map: ChunkMap) -> None:
    timer = threading.Timer(0.1, chunk_map.stop_watching)
    timer.start()
    began = time.monotonic()
    assert next_event(chunk_map, os.getpid()) is Event.STOPPED
    assert time.monotonic() - began < PATIENCE / 2
    timer.join()


def test_waiting_ends_with_the_process(chunk_map: ChunkMap, hook: FakeHook) -> None:
    """Also when its hook has posted: what it freed is gone with it."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        timer = threading.Timer(0.1, child.kill)
        timer.start()
        assert next_event(chunk_map, child.pid) is Event.ENDED
        timer.join()
        hook.free(1)  # a zombie until the end of the block
        assert next_event(chunk_map, child.pid) is Event.ENDED


def test_another_process_sees_the_same(chunk_map: ChunkMap) -> None:
    script = (
        "import sys; from tests.node.mover.fake_hook import FakeHook; "
        "hook = FakeHook(int(sys.argv[1])); hook.free(9); print(hook.counts())"
    )
    command = [sys.executable, "-c", script, str(chunk_map.fd)]
    done = subprocess.run(
        command, pass_fds=[chunk_map.fd], capture_output=True, check=True, text=True
    )
    assert done.stdout.strip() == "[3, 706, 3, 52, 0]"
    assert chunk_map.freed() == [9]


def test_what_makes_no_board() -> None:
    for blocks in ([(2, 1), (1, 1)], [(1, 1), (1, 1)]):
        with pytest.raises(Internal, match="sorted by id"):
            ChunkMap.create(blocks, [])
    with pytest.raises(Internal, match="making a chunk map"):
        ChunkMap.create([(1, 1 << 31), (2, 1 << 31)], [])


def test_an_empty_chunk_map(chunk_map: ChunkMap) -> None:
    with ChunkMap.create([], []) as empty:
        hook = FakeHook(empty.fd)
        hook.free(77)
        assert empty.freed() == [77]
        hook.close()
    assert empty.fd == -1
    empty.close()


def test_sixty_thousand_chunks_take_milliseconds() -> None:
    blocks = [(i, 50) for i in range(1200)]
    start = time.process_time()
    with ChunkMap.create(blocks, [(0, 1000)] * 32) as chunk_map:
        chunk_map.mark_saved(range(0, 60_000, 2))
        for block, _ in blocks:
            chunk_map.touched(block)
    assert time.process_time() - start < 0.5
