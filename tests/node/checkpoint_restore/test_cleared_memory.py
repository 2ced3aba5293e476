"""Device memory that nobody has written takes no room: a server's cache for keys and values."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.image.manifest import Manifest
from phosd.engine.image.usage import pack_bytes
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations import admission
from phosd.engine.operations import suspend as suspend_module
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint, try_checkpoint
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program.group import CheckpointGroup
from phosd.engine.system import memory_mount
from phosd.errors import OutOfSpace
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import (
    AFTER,
    Undisturbed,
    bring_back,
    check,
    computes_right,
    run_cycle,
    save,
)
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.support.harness import Target, wait_until

CACHE = 128 << 20
ROOM = 48 << 20
"""Enough for what the program has written and a few chunks, and not for its cache."""


@pytest.fixture
def target(start: Starter) -> Target:
    made = start("cleared")
    made.wait_for_steps(3)
    return made


@pytest.fixture
def little_room(node: Node) -> Iterator[pytest.MonkeyPatch]:
    """The disk has room for CRIU's files, and not for all device memory, until this is undone."""
    estimate = admission._estimate

    def noted(group: CheckpointGroup, mode: str, config: NodeConfig) -> admission.Needs:
        needs = estimate(group, mode, config)
        patch.setattr(node.store, "free_bytes", lambda: needs.image.files + ROOM)
        return needs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "_estimate", noted)
        yield patch


def filled_at(phase: str, target: Target) -> Progress:
    """A progress at whose phase the program has just written all of its cache."""

    def fill(_: Progress) -> None:
        mark = target.position()
        os.kill(target.pid, signal.SIGUSR1)
        wait_until(lambda: b"filled" in target.log.read_bytes()[mark:], "the cache to be filled")

    return at_phase(phase, fill)


def stored(image: Manifest) -> int:
    assert image.device_bytes > CACHE
    return sum(pack_bytes(image).values())


@pytest.mark.parametrize("mode", ["concurrent", "recopy", "stop"])
@pytest.mark.usefixtures("little_room")
def test_it_takes_no_room(mode: str, node: Node, target: Target, undisturbed: Undisturbed) -> None:
    found = try_checkpoint(node, target.pid, CheckpointOptions(mode=mode), Progress())
    assert not any(each.trouble for each in found)
    assert stored(run_cycle(node, target, mode, undisturbed)) < ROOM


@pytest.mark.parametrize("mode", ["concurrent", "stop"])
def test_it_is_written_before_the_stop(
    mode: str, node: Node, target: Target, little_room: pytest.MonkeyPatch
) -> None:
    """The job says that there is no room, and the program goes on; with room it is saved."""
    with pytest.raises(OutOfSpace, match="the disk has room for"):
        checkpoint(node, target.pid, CheckpointOptions(mode=mode), filled_at("quiesce", target))
    target.more_steps(2)
    assert node.store.list() == []
    little_room.undo()
    comes_back(node, target, save(node, target, mode))


def comes_back(node: Node, target: Target, image: Manifest) -> None:
    """It was saved with all of its cache, and is restored."""
    assert stored(image) > CACHE
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    check(bring_back(node, target, image.id), original, {})


def test_it_is_written_while_the_memory_tier_has_room_for_the_rest(
    place: Path, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image goes to the disk at once."""
    config = NodeConfig(state_dir=place / "state", runtime_dir=place / "run", memory_tier=4 << 30)
    with Node(config) as node:
        target = start("cleared")
        target.wait_for_steps(3)
        tier = node.store.memory
        assert tier is not None
        monkeypatch.setattr(tier, "room", lambda files, others: ROOM)
        monkeypatch.setattr(tier, "has_room", lambda files, chunks, others: chunks < CACHE)
        quiet = checkpoint(node, target.pid, CheckpointOptions(), Progress())
        assert not node.store.is_durable(quiet.id) and stored(quiet) < ROOM
        progress = filled_at("quiesce", target)
        image = checkpoint(node, target.pid, CheckpointOptions(), progress)
        assert any("the memory tier has room for" in note for note in progress.notes)
        assert node.store.is_durable(image.id)
        comes_back(node, target, image)
    while config.memory_tier_dir.is_mount():
        assert memory_mount.unmount(config.memory_tier_dir) == ""


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_suspension(
    where: str,
    node: Node,
    target: Target,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suspend_module, "room_on", lambda *_: ROOM)
    options = SuspendOptions(where=where)
    assert suspend(node, target.pid, options, Progress()).stored_bytes < ROOM
    resume(node, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)
    with pytest.raises(OutOfSpace, match="room for"):
        suspend(node, target.pid, options, filled_at("quiesce", target))
    target.more_steps(2)
    assert node.suspended.all() == []
