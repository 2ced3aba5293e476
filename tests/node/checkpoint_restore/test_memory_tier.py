"""Programs whose images are made in memory."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.node.suspended import FORMAT, IN_RUNTIME_DIR
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.system import memory_mount
from phosd.errors import OutOfSpace
from tests.node.checkpoint_restore.conftest import Starter, named_shelf
from tests.node.checkpoint_restore.cycle import (
    AFTER,
    Undisturbed,
    all_compute_right,
    bring_back,
    check,
    computes_right,
    run_cycle,
    save,
)


@pytest.fixture
def config(place: Path) -> Iterator[NodeConfig]:
    made = NodeConfig(state_dir=place / "state", runtime_dir=place / "run", memory_tier=4 << 30)
    yield made
    while made.memory_tier_dir.is_mount():  # images are only in memory
        assert memory_mount.unmount(made.memory_tier_dir) == ""


@pytest.fixture
def node(config: NodeConfig) -> Iterator[Node]:
    with Node(config) as made:
        yield made


@pytest.mark.parametrize("mode", ["concurrent", "recopy", "stop", "driver"])
def test_it_is_restored_from_memory_and_from_the_disk(
    mode: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single", hooked=mode != "driver")
    image = run_cycle(node, target, mode, undisturbed)
    assert not node.store.is_durable(image.id)
    node.store.write_back.write(image.id, Progress())
    assert memory_mount.unmount(node.config.memory_tier_dir) == ""
    original = target.values()
    target.kill()
    check(bring_back(node, target, image.id), original, undisturbed(target.program))
    computes_right(target, undisturbed)
    later = save(node, target, mode)  # to the disk, as there is nothing else
    assert node.store.is_durable(later.id)


def test_what_stays_in_memory_is_told_only_if_it_is_much(
    config: NodeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In systemd's sandbox phosd may not unmount, so there it was told at each stop."""
    monkeypatch.setattr(memory_mount, "unmount", lambda _: "Operation not permitted")
    with caplog.at_level(logging.INFO):
        with Node(config):
            pass
        assert caplog.text == ""
        with Node(config):
            (config.memory_tier_dir / "copy").write_bytes(bytes(3 << 20))
    assert "3.0 MiB of images, which are on the disk, too, stay in memory" in caplog.text


def test_an_image_outlives_its_phosd(
    config: NodeConfig, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single")
    with Node(config) as first:
        target.wait_for_steps(5)
        image = save(first, target, "stop")
        target.more_steps(AFTER)
        target.kill()
    original = target.values()
    with Node(config) as second:
        assert second.store.write_back.pending() == [image.id]
        check(bring_back(second, target, image.id), original, undisturbed(target.program))
        second.store.write_back.write(image.id, Progress())
    assert not config.memory_tier_dir.is_mount(), "nothing is in memory only"
    with Node(config) as third:
        assert third.store.list() == [image]
        computes_right(target, undisturbed)


def test_a_suspended_program_lies_beside_images(
    config: NodeConfig, start: Starter, undisturbed: Undisturbed
) -> None:
    """On its huge pages, also while phosd is away; the limit of the tier is that of images."""
    target = start("single")
    with Node(config) as first:
        target.wait_for_steps(5)
        memory = first.store.memory
        assert memory is not None
        before = memory.taken_bytes()
        suspended = suspend(first, target.pid, SuspendOptions(where="memory"), Progress())
        assert (config.memory_tier_dir / "suspended/images" / suspended.image).exists()
        assert memory.taken_bytes() < before + suspended.stored_bytes / 2
        assert not named_shelf(config.runtime_dir).exists()
    assert config.memory_tier_dir.is_mount()
    with Node(config) as second:
        resume(second, target.pid, ResumeOptions(), Progress())
        computes_right(target, undisturbed)
    assert not config.memory_tier_dir.is_mount()


def test_what_an_earlier_phosd_has_suspended_is_found(
    config: NodeConfig, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In /dev/shm, where nothing more is suspended to. An earlier one refuses what is not there."""
    before, after = start("single"), start("single")
    for target in (before, after):
        target.wait_for_steps(5)
    with monkeypatch.context() as patch, Node(replace(config, memory_tier=0)) as first:
        patch.setattr(memory_mount, "mount", lambda _folder: "Operation not permitted")
        old = suspend(first, before.pid, SuspendOptions(where="memory"), Progress())
    there = named_shelf(config.runtime_dir) / "images"
    assert [each.name for each in there.iterdir()] == [old.image]
    assert old.format == FORMAT
    for limit in (0, config.memory_tier):
        with Node(replace(config, memory_tier=limit)) as second:
            second.suspend_store.sweep()
            new = suspend(second, after.pid, SuspendOptions(where="memory"), Progress())
            assert (config.memory_tier_dir / "suspended/images" / new.image).exists()
            assert [each.name for each in there.iterdir()] == [old.image]
            assert new.format == IN_RUNTIME_DIR
        with Node(config) as third:
            resume(third, after.pid, ResumeOptions(), Progress())
    with Node(config) as last:
        resume(last, before.pid, ResumeOptions(), Progress())
        all_compute_right(undisturbed, before, after)
    assert not there.exists()
    assert not config.memory_tier_dir.is_mount()


def test_a_checkpoint_may_wait_until_its_image_is_durable(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single")
    target.wait_for_steps(5)
    progress = Progress()
    image = checkpoint(node, target.pid, CheckpointOptions(mode="stop", durable=True), progress)
    assert node.store.is_durable(image.id)
    last = progress.phases[-1]
    assert (last.name, last.stopped) == ("write", False)
    assert last.bytes_done == last.bytes_total > 0
    computes_right(target, undisturbed)


def test_the_disk_is_full(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image is there all the same, and the job tells so."""
    target = start("single")
    target.wait_for_steps(5)
    progress = Progress()

    def full(image: str, progress: Progress, *, stopped: bool) -> None:
        raise OutOfSpace(f"writing image {image} failed", hint="make room")

    monkeypatch.setattr(node.store.write_back, "write", full)
    with pytest.raises(OutOfSpace, match="writing image"):
        checkpoint(node, target.pid, CheckpointOptions(mode="stop", durable=True), progress)
    (image,) = node.store.list()
    assert any(f"image {image.id} was made, but is not on the disk" in n for n in progress.notes)
    computes_right(target, undisturbed)


def test_what_does_not_fit_goes_to_the_disk_and_the_job_says_so(
    place: Path, config: NodeConfig, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single")
    target.wait_for_steps(5)
    small = NodeConfig(config.state_dir, config.runtime_dir, memory_tier=16 << 20)
    with Node(small) as node:
        progress = Progress()
        image = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), progress)
        assert node.store.is_durable(image.id)
    assert any("the memory tier has no room" in note for note in progress.notes)
    computes_right(target, undisturbed)
