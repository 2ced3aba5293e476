"""Four ranks in a ring, whose kernels wait for each other, as those of an all-reduce do."""

import itertools
import os
import re
import signal
import threading

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.errors import Busy, PhosError
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import (
    AFTER,
    REST,
    Undisturbed,
    bring_back,
    check,
    computes_right,
    save,
)
from tests.node.checkpoint_restore.test_trouble import PHASES, at_phase, soon
from tests.support.harness import children, halt, wait_until
from tests.support.rotation import SOAK, times

RANKS = 4
MODES = ("concurrent", "stop", "recopy")
IN_PLACE = times(len(MODES), everything=12, soak=200)
RESTORES = times(1, everything=3, soak=20)

pytestmark = pytest.mark.usefixtures("two_gpus")
long_when_complete = pytest.mark.timeout(5400 if SOAK else 600)


@long_when_complete
def test_they_are_saved_again_and_again(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("ring")
    target.wait_for_steps(3)
    for mode in itertools.islice(itertools.cycle(MODES), IN_PLACE):
        image = save(node, target, mode)
        assert sum(process.gpu for process in image.processes) == RANKS
        node.store.delete(image.id)
        target.more_steps(2)
    computes_right(target, undisturbed)


@long_when_complete
def test_they_are_killed_and_restored(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("ring")
    target.wait_for_steps(3)
    for mode in itertools.islice(itertools.cycle(MODES), RESTORES):
        image = save(node, target, mode)
        target.more_steps(AFTER)
        target.kill()
        original = target.values()
        check(bring_back(node, target, image.id), original, undisturbed("ring"))
        node.store.delete(image.id)


def test_they_sleep(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("ring")
    target.wait_for_steps(3)
    suspend(node, target.pid, SuspendOptions(deadline=REST), Progress())
    resume(node, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_dies(phase: str, node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """The others wait for it on their devices for ever, with phosd or without."""
    target = start("ring")
    target.wait_for_steps(3)
    last = max(children(target.pid))
    at_rest = phase not in ("prepare", "quiesce")  # before, they wait until the deadline
    options = CheckpointOptions(mode="stop", deadline=REST if at_rest else 5)
    with soon() as begins, pytest.raises(PhosError, match=rf"process {last}\b"):
        progress = at_phase(phase, begins(lambda: os.kill(last, signal.SIGKILL)))
        checkpoint(node, target.pid, options, progress)
    assert node.store.list() == []
    target.kill()
    other = start("ring")
    other.wait_for_steps(3)
    save(node, other, "stop")
    computes_right(other, undisturbed)


def test_a_rank_that_the_others_wait_for(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("ring", arguments=("0", "missing"))
    target.wait_for_steps(3)
    hold = target.log.parent / "hold"
    hold.touch()

    def in_one_step() -> bool:
        said = target.log.read_text()
        missing = re.search(r"missing in (\d+)\n", said)
        return missing is not None and f"waits in {missing[1]}\n" in said

    wait_until(in_one_step, "the others to wait for the last")
    short = CheckpointOptions(mode="stop", deadline=0.5)
    with pytest.raises(Busy, match=r"process \d+ keeps its GPU busy"):
        checkpoint(node, target.pid, short, Progress())
    threading.Timer(0.3, hold.unlink).start()
    checkpoint(node, target.pid, CheckpointOptions(mode="stop", deadline=REST), Progress())
    computes_right(target, undisturbed)


def test_a_rank_is_stopped(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("ring")
    target.wait_for_steps(3)
    last = max(children(target.pid))
    halt(last)
    with pytest.raises(Busy, match=f"process {last} is stopped"):
        checkpoint(node, target.pid, CheckpointOptions(mode="stop", deadline=REST), Progress())
    os.kill(last, signal.SIGCONT)
    save(node, target, "stop")
    computes_right(target, undisturbed)
