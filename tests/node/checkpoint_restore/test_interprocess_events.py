"""Programs that share events and memory by legacy CUDA IPC, as torch.multiprocessing does."""

import contextlib
import os
import signal

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.system.cuda import is_software
from phosd.errors import PhosError, Unsupported
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
from tests.support import harness
from tests.support.rotation import EVERYTHING

PROGRAM = "tensor_queue"
MODES = ("concurrent", "recopy", "stop")
TIMES = 20 if EVERYTHING else 10
QUICK = {"PHOS_TEST_PACE": "0.005"}


@pytest.fixture(scope="session")
def undisturbed() -> Undisturbed:
    """What the program computes without checkpoints, and without the hook where there is CUDA IPC
    without it. Which GPU the second process is on makes no difference.
    """

    def values(
        program: str, steps: int = 60, compared: harness.Target | None = None
    ) -> dict[int, str]:
        return harness.undisturbed(program, steps, compared=compared, hooked=is_software())

    return values


@pytest.mark.parametrize("mode", MODES)
def test_values_are_equal_after_kill_and_restore(
    node: Node, start: Starter, undisturbed: Undisturbed, mode: str
) -> None:
    manifest = run_cycle(node, start(PROGRAM, extra=QUICK), mode, undisturbed)
    words = [block for block in manifest.blocks if block.host]
    assert {block.process for block in words} == {0, 1}, "each process has words of its own"
    assert any(block.alias for block in words), "words that both have were saved twice"


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("mode", MODES)
def test_many_checkpoints_at_any_moment(
    node: Node, start: Starter, undisturbed: Undisturbed, mode: str
) -> None:
    target = start(PROGRAM, extra=QUICK)
    target.wait_for_steps(3)
    for number in range(TIMES):
        checkpoint(node, target.pid, CheckpointOptions(mode=mode), Progress())
        target.more_steps(1 + number % 3)
    computes_right(target, undisturbed)


def test_the_driver_alone_cannot_save_it(node: Node, start: Starter) -> None:
    target = start(PROGRAM)
    target.wait_for_steps(3)
    with pytest.raises(Unsupported, match="shares device memory"):
        save(node, target, "driver")


@pytest.mark.parametrize("arguments", [("0",), ("0", "two")], ids=["one GPU", "two GPUs"])
def test_it_is_suspended_and_resumed(
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    arguments: tuple[str, ...],
    request: pytest.FixtureRequest,
) -> None:
    if "two" in arguments:
        request.getfixturevalue("two_gpus")
    target = start(PROGRAM, arguments=arguments, extra=QUICK)
    for _ in range(2):
        target.more_steps(3)
        suspend(node, target.pid, SuspendOptions(), Progress())
        resume(node, target.pid, ResumeOptions(), Progress())
    computes_right(target, undisturbed)


@pytest.mark.usefixtures("two_gpus")
def test_it_moves_to_another_gpu(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start(PROGRAM, extra=QUICK)
    target.wait_for_steps(3)
    migrate(node, target.pid, MigrateOptions("1"), Progress())
    target.more_steps(3)
    suspend(node, target.pid, SuspendOptions(), Progress())
    resume(node, target.pid, ResumeOptions("0"), Progress())
    computes_right(target, undisturbed)


@pytest.mark.parametrize("saved_before", [False, True])
def test_who_is_left_goes_on_when_its_peer_has_died(
    node: Node, start: Starter, saved_before: bool
) -> None:
    """The peer had opened the program's events, and owned one that the program has opened."""
    target = start(PROGRAM, arguments=("0", "alone"), extra=QUICK)
    target.wait_for_steps(5)
    if saved_before:
        save(node, target, "concurrent")
        target.more_steps(2)
    (peer,) = harness.children(target.pid)
    os.kill(peer, signal.SIGKILL)
    target.more_steps(3)
    manifest = save(node, target, "concurrent")
    target.more_steps(AFTER)
    target.kill()
    check(bring_back(node, target, manifest.id), target.values(), {})


@pytest.mark.rotated(of=4)
@pytest.mark.parametrize("phase", ["prepare", "quiesce", "cpu", "drain"])
def test_the_peer_dies_during_a_checkpoint(node: Node, start: Starter, phase: str) -> None:
    target = start(PROGRAM, arguments=("0", "alone"), extra=QUICK)
    target.wait_for_steps(5)
    (peer,) = harness.children(target.pid)
    progress = at_phase(phase, lambda _: os.kill(peer, signal.SIGKILL))
    with contextlib.suppress(PhosError):  # or it is tried again, without the peer
        checkpoint(node, target.pid, CheckpointOptions(mode="concurrent"), progress)
    target.more_steps(3)
    manifest = save(node, target, "concurrent")
    target.more_steps(AFTER)
    target.kill()
    check(bring_back(node, target, manifest.id), target.values(), {})
