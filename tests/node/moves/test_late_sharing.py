"""A program begins to share memory when a job is under way already: both sides get the same, or the
job gives up.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.errors import Busy
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, bring_back, computes_right
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.support.harness import Target, children, wait_until

Act = Callable[[Node, int, Progress], None]


def go(node: Node, pid: int, progress: Progress) -> None:
    migrate(node, pid, MigrateOptions("1"), progress)


def go_and_return(node: Node, pid: int, progress: Progress) -> None:
    go(node, pid, progress)
    migrate(node, pid, MigrateOptions("0"), Progress())


def sleep_and_wake(node: Node, pid: int, progress: Progress) -> None:
    suspend(node, pid, SuspendOptions(), progress)
    resume(node, pid, ResumeOptions("1"), Progress())


def save(node: Node, pid: int, progress: Progress) -> None:
    checkpoint(node, pid, CheckpointOptions(mode="stop"), progress)


def sharing(place: Path, phase: str = "quiesce") -> Progress:
    """Return the progress of a job during which the program begins to share, before its stop."""

    def share(_: Progress) -> None:
        (place / "share").touch()
        wait_until((place / "shared").exists, "the program to share its memory")

    return at_phase(phase, share)


def begin(start: Starter, where: str) -> Target:
    target = start("late_pair", arguments=("0", where))
    target.wait_for_steps(3)
    return target


@pytest.mark.parametrize(
    ("act", "phase"),
    [(go, "precopy"), (go, "quiesce"), (go_and_return, "quiesce"), (sleep_and_wake, "quiesce")],
)
def test_with_a_process_of_its_own(
    act: Act, phase: str, place: Path, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = begin(start, "below")
    act(node, target.pid, sharing(place, phase))
    computes_right(target, undisturbed)


@pytest.mark.parametrize("mode", ["concurrent", "recopy", "stop"])
def test_while_it_is_saved(
    mode: str, place: Path, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = begin(start, "below")
    image = checkpoint(node, target.pid, CheckpointOptions(mode=mode), sharing(place))
    assert any(block.alias for block in image.blocks)
    target.more_steps(AFTER)
    target.kill()
    bring_back(node, target, image.id)
    computes_right(target, undisturbed)


def test_what_is_kept_of_a_job_that_failed(
    place: Path, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """The next job finds it shared."""

    def fail(_: Progress) -> None:
        raise ZeroDivisionError

    target = begin(start, "below")
    with pytest.raises(ZeroDivisionError):
        go(node, target.pid, at_phase("quiesce", fail))
    (place / "share").touch()
    wait_until((place / "shared").exists, "the program to share its memory")
    go(node, target.pid, Progress())
    computes_right(target, undisturbed)


@pytest.mark.parametrize("act", [go, sleep_and_wake])
def test_with_a_process_of_another_tree(
    act: Act, place: Path, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """It was not stopped, and would go on with the old memory."""
    target = begin(start, "beside")
    other, pid = sorted(children(target.pid))
    with pytest.raises(Busy, match=f"{pid} has begun to share its device memory with .* {other};"):
        act(node, pid, sharing(place))
    computes_right(target, undisturbed)
    act(node, pid, Progress())
    computes_right(target, undisturbed)


@pytest.mark.parametrize("act", [go, sleep_and_wake, save])
def test_with_a_process_that_begins_to_use_the_gpu(
    act: Act, place: Path, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = begin(start, "new")
    (new,) = children(target.pid)
    with pytest.raises(Busy, match=f"{new} (has begun|began) to use (a|the) GPU"):
        act(node, target.pid, sharing(place))
    assert node.store.list() == []
    computes_right(target, undisturbed)
    act(node, target.pid, Progress())
    computes_right(target, undisturbed)
