"""The cycle that everything here is about: checkpoint, go on, kill, restore, compare."""

from collections.abc import Callable

from phosd.engine import (
    CheckpointOptions,
    Manifest,
    Node,
    Progress,
    RestoreOptions,
    checkpoint,
    restore,
    verify,
)
from tests.support.harness import Target

AFTER = 16
"""Steps to compare after a restore: more than the programs need to touch all of their memory."""

REST = 60.0
"""Seconds in which a program comes to rest also where others have the processors, too, which do the
work of the software GPU.
"""

Undisturbed = Callable[..., dict[int, str]]


def save(node: Node, target: Target, mode: str) -> Manifest:
    """A checkpoint of the target, verified."""
    manifest = checkpoint(node, target.pid, CheckpointOptions(mode=mode, deadline=REST), Progress())
    verify(node.store, manifest.id, Progress())
    return manifest


def bring_back(node: Node, target: Target, image: str) -> dict[int, str]:
    """Restore the image in place of a killed target; the values of its first ``AFTER`` steps."""
    mark = target.position()
    result = restore(node, image, RestoreOptions(), Progress())
    assert result.pid == target.pid
    return target.wait_for_steps(AFTER, since=mark)


def check(restored: dict[int, str], original: dict[int, str], right: dict[int, str]) -> None:
    """The restored program went on from the checkpoint, and computed what is right."""
    steps = sorted(restored)
    assert steps == list(range(steps[0], steps[-1] + 1)), "a step is missing"
    common = restored.keys() & original.keys()
    assert len(common) >= AFTER, "too few steps were computed twice to compare them"
    assert {s: restored[s] for s in common} == {s: original[s] for s in common}
    known = (restored.keys() | original.keys()) & right.keys()
    both = original | restored
    assert {s: both[s] for s in known} == {s: right[s] for s in known}


def computes_right(target: Target, undisturbed: Undisturbed) -> None:
    """The target goes on, and all that it has computed is what it computes undisturbed."""
    target.more_steps(2)
    computed_right(target, undisturbed)


def all_compute_right(undisturbed: Undisturbed, *targets: Target) -> None:
    """The targets go on, and have computed what is right. They end first: they would come ever
    further, each while the others are computed again, and slow that down.
    """
    for target in targets:
        target.more_steps(2)
    for target in targets:
        target.kill()
    for target in targets:
        computed_right(target, undisturbed)


def computed_right(target: Target, undisturbed: Undisturbed) -> None:
    """All that the target has computed is what it computes undisturbed."""
    values = target.values()
    right = undisturbed(target.program, steps=max(values) + 1, compared=target)
    wrong = [step for step in sorted(values) if values[step] != right[step]]
    assert not wrong, f"{target.program} computed wrong values at steps {wrong[:3]}"


def run_cycle(node: Node, target: Target, mode: str, undisturbed: Undisturbed) -> Manifest:
    """The whole cycle for a target that has just been started."""
    target.wait_for_steps(5)
    manifest = save(node, target, mode)
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    restored = bring_back(node, target, manifest.id)
    assert min(restored) <= max(original) - AFTER + 1, "it did not go back to the checkpoint"
    check(restored, original, undisturbed(target.program))
    return manifest
