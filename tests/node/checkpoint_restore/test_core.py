"""The core test: what a program computes after kill -9 and restore is what it computed before."""

import pytest

from phosd.engine.image.store import packs_of
from phosd.engine.node.node import Node
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
from tests.support import harness

pytestmark = pytest.mark.always
ON_TWO_GPUS = ("two_devices", "peers")
PROGRAMS = ("single", "threads", "features", "churn", "workers", *ON_TWO_GPUS)


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("mode", ["stop", "driver"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_values_are_equal_after_kill_and_restore(
    program: str,
    mode: str,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    request: pytest.FixtureRequest,
) -> None:
    if program in ON_TWO_GPUS:
        request.getfixturevalue("two_gpus")
    target = start(program)
    manifest = run_cycle(node, target, mode, undisturbed)
    assert manifest.mode == mode
    assert bool(manifest.blocks) == (mode == "stop")


@pytest.mark.parametrize("mode", ["stop", "concurrent", "recopy", "driver"])
def test_a_program_without_device_memory(
    mode: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """It is parked all the same, with no block to give back."""
    manifest = run_cycle(node, start("host_only"), mode, undisturbed)
    assert manifest.blocks == ()


@pytest.mark.parametrize("mode", ["stop", "concurrent", "driver"])
def test_managed_memory_in_the_host(
    mode: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """The program computes what it does with the driver's managed memory."""
    run_cycle(node, start("managed", extra={"PHOS_MANAGED": "host"}), mode, undisturbed)


def test_the_driver_locks_a_program_whose_kernel_waits_for_a_later_one(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """The later one cannot be launched while the lock waits for the first."""
    target = start("late", hooked=False)
    harness.wait_until(lambda: b"waiting" in target.log.read_bytes(), "the kernel that waits")
    assert save(node, target, "driver").mode == "driver"
    computes_right(target, undisturbed)


def test_without_the_hook(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("single", hooked=False)
    manifest = run_cycle(node, target, "auto", undisturbed)
    assert manifest.mode == "driver"
    assert not any(process.hooked for process in manifest.processes)


def test_a_restored_program_can_be_checkpointed_and_restored_again(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single")
    run_cycle(node, target, "stop", undisturbed)
    second = save(node, target, "stop")
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    check(bring_back(node, target, second.id), original, undisturbed("single"))


def test_one_image_can_be_restored_twice(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single")
    image = run_cycle(node, target, "stop", undisturbed).id
    target.kill()
    check(bring_back(node, target, image), target.values(), undisturbed("single"))


def test_many_checkpoints_of_a_running_program(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Each is a moment of the same undisturbed computation; the last can be restored."""
    target = start("threads", extra={"PHOS_TEST_PACE": "0"})
    target.wait_for_steps(3)
    for _ in range(4):
        last = save(node, target, "stop")
        target.more_steps(2)
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    check(bring_back(node, target, last.id), original, undisturbed("threads"))


def test_processes_that_share_device_memory_go_on(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("shared_pair")
    target.wait_for_steps(5)
    for _ in range(3):
        manifest = save(node, target, "stop")
        target.more_steps(3)
    assert any(block.alias for block in manifest.blocks), "the shared block was saved twice"
    target.more_steps(AFTER)
    computes_right(target, undisturbed)


def test_processes_that_share_device_memory_are_restored_together(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    run_cycle(node, start("shared_pair"), "stop", undisturbed)


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("mode", ["stop", "concurrent", "recopy"])
def test_what_another_program_has_is_not_stored_again(
    mode: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Without a parent, and its image is of use when that of the other one is gone."""
    other, target = start("caching"), start("caching")
    other.wait_for_steps(3)
    first = save(node, other, mode)
    other.kill()
    target.wait_for_steps(3)
    second = save(node, target, mode)
    assert packs_of(first) & packs_of(second)
    node.store.delete(first.id)
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    check(bring_back(node, target, second.id), original, undisturbed("caching"))
