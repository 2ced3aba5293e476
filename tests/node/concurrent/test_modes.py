"""The core test in the modes that copy while the program runs, with movers so slow that it goes far
meanwhile; and every image is, chunk by chunk, the memory of its stop.
"""

import math

import pytest

from phosd.engine.job.checkpoint_history import CheckpointHistory
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions
from tests.node.checkpoint_restore.cycle import AFTER, bring_back, check
from tests.node.concurrent.conftest import Starter, Undisturbed
from tests.node.concurrent.watch import Watch, braked_movers, watched

PROGRAMS = (
    *("single", "threads", "features", "churn", "workers", "two_devices", "shared_pair"),
    *("capture", "doors"),
)
GROWN = {"churn": 60}
"""Steps after which a program has as much memory as it ever has, when it grows."""
ITERATIONS = 8
"""Steps that a program makes meanwhile, at the least."""


@pytest.mark.rotated(of=4)
@pytest.mark.parametrize(
    ("mode", "snapshots"),
    [("concurrent", True), ("concurrent", False), ("recopy", False), ("stop", False)],
    ids=["snapshot", "on_write", "recopy", "stop"],
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_values_are_equal_after_kill_and_restore(
    program: str, mode: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start(program)
    target.wait_for_steps(GROWN.get(program, 5))
    with braked_movers(node, target, ITERATIONS, gpus=2) as brake:
        options = CheckpointOptions(mode=mode, fallback="none")
        manifest, watch = watched(node, target, options, brake)
    assert manifest.mode == mode
    assert manifest.wrong_guesses == 0
    beside = steps_beside(watch, mode)
    if mode == "concurrent" and not node.config.snapshots:
        # A program with few chunks may soon write one that is on its way to the host, slowly, and
        # wait for it. Those of two_devices, three a GPU, are all on their way at once.
        assert beside >= 1 or program == "two_devices"
    else:
        assert beside >= ITERATIONS
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    restored = bring_back(node, target, manifest.id)
    assert min(restored) <= max(original) - AFTER + 1, "it did not go back to the checkpoint"
    check(restored, original, undisturbed(program))


def steps_beside(watch: Watch, mode: str) -> float:
    """How many steps the program made while it was copied."""
    if mode == "stop":
        return math.inf  # it makes none, and need not
    return watch.steps_in("drain") if mode == "concurrent" else watch.steps_before("quiesce")


@pytest.mark.parametrize("snapshots", [True, False])
def test_auto_goes_by_what_was_seen_before(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("single")
    target.wait_for_steps(5)
    wrong = CheckpointHistory.Entry("recopy", guessed_wrong=True, starved=False, lost=1.0)
    with braked_movers(node, target, ITERATIONS) as brake:
        manifest, _ = watched(node, target, CheckpointOptions(), brake)
        assert manifest.mode == "concurrent"
        again = CheckpointOptions(experience=CheckpointHistory(past=(wrong, wrong)))
        manifest, _ = watched(node, target, again, brake)
        assert manifest.mode == "recopy"
        assert "guess was wrong" in manifest.why
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    check(bring_back(node, target, manifest.id), original, undisturbed("single"))


@pytest.mark.parametrize("snapshots", [True, False])
def test_one_checkpoint_after_the_other(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """In all modes, of one process; the last image is restored, saved again and restored again."""
    target = start("single")
    target.wait_for_steps(5)
    with braked_movers(node, target, 2) as brake:
        for mode in ("concurrent", "recopy", "concurrent", "stop", "concurrent", "driver"):
            options = CheckpointOptions(mode=mode, fallback="none")
            manifest, _ = watched(node, target, options, brake)
            assert manifest.mode == mode
            target.more_steps(2)
        for _ in range(2):
            options = CheckpointOptions(mode="concurrent")
            manifest, _ = watched(node, target, options, brake)
            target.more_steps(AFTER)
            target.kill()
            original = target.values()
            check(bring_back(node, target, manifest.id), original, undisturbed("single"))
