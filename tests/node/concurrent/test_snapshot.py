"""Memory that is copied inside the stop, where there is room, and what becomes of that copy."""

import contextlib
import time
from dataclasses import replace
from typing import Any

import pytest

from phosd.engine.image.packs import RECORD
from phosd.engine.job.progress import Progress
from phosd.engine.memory import snapshot
from phosd.engine.memory.exported import new_key
from phosd.engine.memory.snapshot import Snapshot
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.errors import MisSpeculation, OutOfMemory
from tests.node.checkpoint_restore.test_fault_points import left, staging
from tests.node.concurrent.conftest import Starter, Undisturbed
from tests.node.concurrent.test_guesses import continues
from tests.node.concurrent.test_pressure import fill
from tests.node.concurrent.watch import Watch, slow_movers, watched
from tests.support.harness import Target

__all__ = ["staging"]  # a fixture: nobody else's files are where this engine stages its own

CHUNK = 2 << 20
TRIES = 5
SECONDS = 1.0
CONCURRENT = CheckpointOptions(mode="concurrent", fallback="none")


@pytest.fixture
def snapshots() -> bool:
    return True


def started(start: Starter, way: str) -> Target:
    target = start("right", way)
    target.wait_for_steps(5)
    return target


def was_taken(progress: Progress) -> bool:
    """Whether there was a snapshot; if not, the program was followed by its hook."""
    figures = progress.figures
    assert (figures.submissions is None) != (figures.snapshot_bytes is None)
    return bool(figures.snapshot_bytes)


def test_it_takes_as_much_memory_as_the_program_has(
    node: Node, start: Starter, start_plainly: Starter, undisturbed: Undisturbed
) -> None:
    target = started(start, "by_value")
    with slow_movers(node, target, SECONDS):
        manifest, watch = watched(node, target, CONCURRENT)
        assert was_taken(watch.progress)
        node.config = replace(node.config, shadow_limit=manifest.device_bytes)
        assert was_taken(watched(node, target, CONCURRENT)[1].progress)
        node.config = replace(node.config, shadow_limit=manifest.device_bytes - 1)
        assert not was_taken(watched(node, target, CONCURRENT)[1].progress)
        node.config = replace(node.config, shadow_limit=None)
        filler = fill(start_plainly, 1 << 30)  # so much is always left to others
        assert not was_taken(watched(node, target, CONCURRENT)[1].progress)
        filler.kill()
        manifest, watch = watched(node, target, CONCURRENT)
        assert was_taken(watch.progress)
    continues(node, target, manifest.id, undisturbed("right", "by_value"))


def test_its_memory_is_given_back_bit_by_bit(
    node: Node, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "_SLAB", 2 * CHUNK)
    node.movers.ring_bytes = 3 * RECORD
    target = started(start, "by_value")
    with slow_movers(node, target, SECONDS):
        mover = node.movers.mover(0)
        checkpoint(node, target.pid, CONCURRENT, Progress())  # what it holds now, it keeps
        before = mover.free_memory()[0]
        seen = []

        def look(progress: Progress) -> None:
            if progress.phases[-1].name == "drain":
                seen.append(mover.free_memory()[0])

        manifest = checkpoint(node, target.pid, CONCURRENT, Progress(look))
    least = before - manifest.device_bytes
    assert min(seen) <= least + 4 * CHUNK
    assert any(least + 4 * CHUNK < free < before - 4 * CHUNK for free in seen)


@pytest.mark.parametrize("slab", [2 * CHUNK, 2 << 30], ids=["slabs", "one slab"])
def test_a_program_waits_for_what_is_about_to_be_given_back(
    slab: int,
    node: Node,
    start: Starter,
    start_plainly: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody takes all that is free: the program, which ends when an allocation fails, goes on
    with what the snapshot gives back.
    """
    monkeypatch.setattr(snapshot, "_SLAB", slab)
    node.movers.ring_bytes = 3 * RECORD
    target = started(start, "growing")
    free = []

    fillers: list[Target] = []

    def no_more() -> None:
        fillers.append(fill(start_plainly, 0))
        free.append(node.movers.mover(0).free_memory()[0])

    with slow_movers(node, target, SECONDS):
        manifest, watch = watched(node, target, CONCURRENT, drain=no_more)
        assert was_taken(watch.progress)
        assert free[0] <= 12 * CHUNK  # as much as it may have freed just then
        target.more_steps(30)  # it has taken and freed its chunks, twice
        fillers[0].kill()
    continues(node, target, manifest.id, undisturbed("right", "growing"))


def test_a_program_that_cannot_wait_gets_everything(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving stands still, as with a disk that does, and what is free a neighbour takes again and
    again: the job gives up, not the program.
    """
    taken: list[int] = []

    def stuck(self: Snapshot, gpu: int, copies: dict[int, int]) -> None:
        mover = node.movers.mover(gpu)
        while True:
            self._account.check()
            if (free := mover.free_memory()[0]) >= CHUNK:
                with contextlib.suppress(OutOfMemory):  # the program was quicker
                    key = new_key()
                    mover.create_together([(key, free // CHUNK * CHUNK)])
                    taken.append(key)
            time.sleep(0.01)

    target = started(start, "growing")
    before = left(node)
    progress = Watch(node, target)
    with monkeypatch.context() as patch:
        patch.setattr(Snapshot, "_save", stuck)
        with pytest.raises(OutOfMemory, match="the program needed the device memory"):
            progress.checkpoint(CONCURRENT)
    assert progress.progress.figures.drain_seconds is not None  # by which the history knows it
    assert node.store.list() == []
    target.more_steps(30)
    node.movers.mover(0).drop(taken)
    assert left(node)[1:3] == before[1:3]
    manifest, _ = watched(node, target, CONCURRENT)
    continues(node, target, manifest.id, undisturbed("right", "growing"))


@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
def test_blocks_that_come_late_are_in_the_image(
    full: bool,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks that are made between the making of room and the stop; with a ``full`` device, too."""
    target = started(start, "growing")
    make_room, create = Snapshot.make_room, Mover.create_together
    later: list[int] = []
    phases: list[str] = []
    watches: list[Watch] = []

    def late(self: Snapshot) -> bool:
        made = make_room(self)
        target.more_steps(8)
        later.append(0)
        return made

    def counted(self: Mover, blocks: Any) -> None:
        if later and blocks:
            later[0] += len(blocks)
            phases.append(watches[-1].progress.phases[-1].name)
            if full:
                raise OutOfMemory("there is nothing left", hint="none")
        create(self, blocks)

    monkeypatch.setattr(Snapshot, "make_room", late)
    monkeypatch.setattr(Mover, "create_together", counted)
    with slow_movers(node, target, SECONDS):
        # Now and then it frees all that it has taken, and the next blocks find room.
        while len(watches) < TRIES and not (later and later[0]):
            later.clear()
            watches.append(Watch(node, target))
            manifest = watches[-1].checkpoint(CONCURRENT)
            watches[-1].require_right(manifest)
            assert was_taken(watches[-1].progress)
    assert later[0] > 0, "no block came late"
    # Later it could be memory that the driver has just set free, and wants back.
    assert set(phases) == {"drain"}
    continues(node, target, manifest.id, undisturbed("right", "growing"))


def nothing(self: Mover, chunks: Any, progress: Progress | None = None) -> None:
    """The copy is not made."""


@pytest.mark.parametrize("fallback", ["none", "auto"])
def test_a_copy_that_is_not_equal_is_found(
    fallback: str,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = started(start, "by_value")
    options = CheckpointOptions(mode="concurrent", fallback=fallback)
    with monkeypatch.context() as patch:
        patch.setattr(Mover, "fetch", nothing)
        if fallback == "auto":
            manifest, watch = watched(node, target, options)
            assert manifest.mode == "recopy"
            assert watch.progress.suspects == []  # no kernel of the program ran meanwhile
        else:
            with pytest.raises(MisSpeculation, match="changed while the gate was closed"):
                watched(node, target, options)
            assert node.store.list() == []
    manifest, _ = watched(node, target, options)
    continues(node, target, manifest.id, undisturbed("right", "by_value"))
