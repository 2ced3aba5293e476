"""Snapshots of several GPUs at once, with movers that only count: what is taken is given back, and
what hooks are told of it.
"""

import contextlib
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phosd.engine.hook_client.link import HookBlock
from phosd.engine.job.progress import Progress
from phosd.engine.memory import snapshot
from phosd.engine.memory.dump import MemoryDump
from phosd.engine.memory.exported import ExportedBlock, new_key
from phosd.engine.memory.snapshot import Snapshot
from phosd.errors import OutOfMemory

CHUNK = 2 << 20
GB = 1 << 30


class Mover:
    """Has so much free memory; blocks that were made together come back with the last of them."""

    alive = True

    def __init__(self, gpu: int, free: int) -> None:
        self.gpu = gpu
        self.free = free
        self.slabs: dict[int, list[int]] = {}
        self.fails = False

    def free_memory(self) -> tuple[int, int]:
        return self.free, self.free

    def create_together(self, rows: Sequence[tuple[int, int]]) -> None:
        if self.fails:
            raise OutOfMemory("there is nothing left", hint="none")
        slab = [len(rows), sum(size for _, size in rows)]
        self.slabs |= {key: slab for key, _ in rows}
        self.free -= slab[1]

    def drop(self, keys: Sequence[int]) -> None:
        for key in keys:
            slab = self.slabs.pop(key)
            slab[0] -= 1
            if not slab[0]:
                self.free += slab[1]

    def copy(
        self, chunks: Mapping[tuple[int, int], bytes], *_: Any, let_go: Any, **__: Any
    ) -> None:
        keys = list(dict.fromkeys(key for key, _ in chunks))
        for at in range(0, len(keys), 16):
            part = keys[at : at + 16]
            self.drop(part)
            let_go(part)
            time.sleep(0.0001)


class ChunkMap:
    """Remembers what it was told."""

    is_starving = False

    def __init__(self) -> None:
        self.exported: dict[int, int] = {}

    def hold(self, device: int, size: int) -> None:
        self.exported[device] = size


class DeviceMemory:
    def __init__(self, blocks: list[ExportedBlock], movers: dict[int, Mover]) -> None:
        self.blocks = blocks
        self.movers = movers

    def all(self) -> list[ExportedBlock]:
        return self.blocks

    @property
    def adopted(self) -> "DeviceMemory":
        return self

    def mover(self, gpu: int) -> Mover:
        return self.movers[gpu]


@pytest.fixture(autouse=True)
def impatient() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def exported(gpu: int, number: int, size: int = CHUNK) -> ExportedBlock:
    block = cast(HookBlock, SimpleNamespace(size=size, device=gpu, id=number))
    return ExportedBlock(1, block, gpu, -1, new_key())


def snapshot_of(
    blocks: list[ExportedBlock], movers: dict[int, Mover], limit: int | None = None
) -> Snapshot:
    @contextlib.contextmanager
    def turn(gpus: Collection[int]) -> Iterator[None]:
        turns.append(set(gpus))
        yield

    turns: list[set[int]] = []
    memory = DeviceMemory(blocks, movers)
    stored: dict[str, Any] = {}
    writer = SimpleNamespace(stored=stored, find=stored.get, add=lambda refs: None)
    dump = MemoryDump(cast(Any, memory), [], cast(Any, writer))
    made = Snapshot(dump, turn, limit)
    assert turns == []
    return made


def test_all_gpus_are_saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the blocks need no saving; slabs have many blocks; chunk maps hear of whole slabs."""
    monkeypatch.setattr(snapshot, "Copies", lambda *_: SimpleNamespace(refs={}))
    monkeypatch.setattr(snapshot, "_SLAB", 100 * CHUNK)
    movers = {gpu: Mover(gpu, 64 * GB) for gpu in range(6)}
    blocks = [exported(gpu, number) for gpu in movers for number in range(1500)]
    chunk_map = ChunkMap()
    with snapshot_of(blocks, movers) as shot:
        assert shot.make_room()
        assert {mover.free for mover in movers.values()} == {64 * GB - 1500 * CHUNK}
        for number, each in enumerate(blocks):
            shot._digests[each.key] = [each.key.to_bytes(16, "big")]
            shot._wanted[each.key] = [0] * (number % 2)
            writer = cast(Any, shot._dump.writer)
            writer.stored[shot._digests[each.key][0].hex()] = each.key
        shot._chunk_maps.append((cast(Any, chunk_map), tuple(movers)))
        shot._account.phase("drain")
        chunks: dict[int, Any] = dict(shot.finish(Progress()))
        assert chunks == {each.key: (each.key,) for each in blocks}
        assert chunk_map.exported == dict.fromkeys(movers, 0)
        assert {mover.free for mover in movers.values()} == {64 * GB}


def test_what_is_held_counts_until_its_slab_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_SLAB", 4 * CHUNK)
    movers = {0: Mover(0, 64 * GB)}
    blocks = [exported(0, number, CHUNK - 4096) for number in range(6)]
    chunk_map = ChunkMap()
    with snapshot_of(blocks, movers) as shot:
        assert shot.make_room()
        shot._chunk_maps.append((cast(Any, chunk_map), (0,)))
        sizes = []
        for each in blocks:
            shot._drop([each.key])
            sizes.append(chunk_map.exported[0] // CHUNK)
        assert sizes == [6, 6, 6, 2, 2, 0]


def test_there_is_room_for_all_or_none_is_taken() -> None:
    movers = {0: Mover(0, 64 * GB), 1: Mover(1, 4 * GB)}
    small, large = exported(0, 1, GB), exported(1, 2, 3 * GB)
    with snapshot_of([small, large], movers) as shot:  # three quarters are not enough for another
        assert shot.make_room()
        assert [mover.free for mover in movers.values()] == [63 * GB, GB]
    larger = exported(1, 3, 3 * GB + CHUNK)
    with snapshot_of([small, larger], movers) as shot:
        assert not shot.make_room()
        assert [mover.free for mover in movers.values()] == [64 * GB, 4 * GB]
    for limit in (3 * GB, 3 * GB - 1):
        with snapshot_of([small, large], movers, limit) as shot:
            assert shot.make_room() == (limit == 3 * GB)
    movers[1].fails = True  # a neighbour was quicker
    with snapshot_of([small, large], movers) as shot:
        assert not shot.make_room()
        assert movers[0].free == 64 * GB
