"""Device memory that is full while a program is saved behind its back."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import pytest

from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions
from phosd.errors import OutOfMemory
from tests.node.concurrent.conftest import Starter, Undisturbed
from tests.node.concurrent.test_guesses import continues
from tests.node.concurrent.watch import braked_movers, slow_movers, watched
from tests.support import harness
from tests.support.harness import Target, halt, wait_until

SECONDS = 0.5
STEPS = 3
"""Steps that a program makes while it is copied, which write to more than what has been copied."""
TRIES = 5
"""Checkpoints until a writer has waited for one of few slots: the mover may free them in time."""
CHUNK = 2 << 20

T = TypeVar("T")


def fill(start_plainly: Starter, leave: int, gpus: str = "0,1") -> Target:
    """Somebody else takes all device memory but ``leave`` bytes of each of these GPUs."""
    filler = start_plainly(
        "filler",
        hooked=False,
        arguments=("0", str(leave)),
        extra={"PYTHONPATH": str(harness.PROGRAMS), "CUDA_VISIBLE_DEVICES": gpus},
    )
    wait_until(lambda: b"took" in filler.log.read_bytes(), "the memory to be taken")
    return filler


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("program", ["right", "two_devices"])
@pytest.mark.parametrize("slots", [0, 1, 3])
def test_few_shadow_slots_or_none(
    slots: int, program: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """A writer waits for the mover instead; the program is slower, and right."""
    way = "by_value" if program == "right" else ""
    target = start(program, way)
    target.wait_for_steps(5)
    node.config = replace(node.config, shadow_limit=slots * CHUNK)
    with braked_movers(node, target, STEPS, gpus=2) as brake:
        options = CheckpointOptions(mode="concurrent", fallback="none")
        for _ in range(TRIES):
            manifest, watch = watched(node, target, options, brake)
            if watch.progress.figures.waits:
                break
    assert watch.progress.figures.waits, "it never waited"
    assert (manifest.mode, manifest.wrong_guesses) == ("concurrent", 0)
    continues(node, target, manifest.id, undisturbed(program, way))


def test_memory_is_full(
    node: Node, start: Starter, start_plainly: Starter, undisturbed: Undisturbed
) -> None:
    """Nothing is left of any GPU."""
    right = undisturbed("two_devices")  # needs a GPU with room
    target = start("two_devices")
    target.wait_for_steps(5)
    with slow_movers(node, target, SECONDS, gpus=2):
        filler = fill(start_plainly, 0)
        options = CheckpointOptions(mode="concurrent", fallback="none")
        manifest, _ = watched(node, target, options)
        filler.kill()
    assert (manifest.mode, manifest.wrong_guesses) == ("concurrent", 0)
    continues(node, target, manifest.id, right)


@pytest.mark.rotated(of=2)
@pytest.mark.parametrize("known", [True, False], ids=["watched", "first"])
@pytest.mark.parametrize("way", ["reallocated", "turned_over"])
def test_freed_memory_is_there_again(
    way: str,
    known: bool,
    node: Node,
    start: Starter,
    start_plainly: Starter,
    undisturbed: Undisturbed,
) -> None:
    """A program that frees and allocates never has less than it had: while it is saved, for the
    first time or not, and ever after. It ends with an error when an allocation fails; a job may
    give up, and is then repeated.
    """
    right = undisturbed("right", way)
    target = start("right", way)
    target.wait_for_steps(8)
    options = CheckpointOptions(mode="concurrent", fallback="none")
    with slow_movers(node, target, SECONDS):
        if known:
            watched(node, target, options)
        with whole(node, target):
            filler = fill(start_plainly, 0, "0")
        for _ in range(2):
            target.more_steps(20)
            manifest = patiently(lambda: watched(node, target, options)[0])
        filler.kill()
    continues(node, target, manifest.id, right)


@contextlib.contextmanager
def whole(node: Node, target: Target) -> Iterator[None]:
    """Inside, the target stands still and has allocated all that it ever has at the same time."""
    mover = node.movers.mover(0)

    def sample() -> int:
        time.sleep(0.01)
        return mover.free_memory()[0]

    def has(least: int) -> bool:
        halt(target.pid)
        time.sleep(0.05)  # nobody else is about to let go of what it has freed
        if mover.free_memory()[0] <= least:  # less: none of the looks fell on such a moment
            return True
        os.kill(target.pid, signal.SIGCONT)
        return False

    def has_all() -> bool:
        # Looked at anew: somebody who ends may have had some of it before.
        least = min(sample() for _ in range(200))
        return any(has(least) for _ in range(50))

    wait_until(has_all, "the target to have all its memory")
    try:
        yield
    finally:
        os.kill(target.pid, signal.SIGCONT)


def patiently(work: Callable[[], T], attempts: int = 5) -> T:
    """What ``work`` gives as soon as it does not want for memory."""
    for _ in range(attempts - 1):
        with contextlib.suppress(OutOfMemory):
            return work()
    return work()


def test_the_memory_of_a_program_that_has_ended_is_free(node: Node, start: Starter) -> None:
    """What the engine knows and keeps of a program after a checkpoint does not outlive it."""
    mover = node.movers.mover(0)
    before = mover.free_memory()[0]
    for _ in range(2):
        target = start("right", "by_value")
        target.more_steps(5)
        watched(node, target, CheckpointOptions(mode="concurrent", fallback="none"))
        target.more_steps(2)
        target.kill()
        wait_until(lambda: mover.free_memory()[0] >= before, "the memory to be free again")
