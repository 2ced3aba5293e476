"""Suspending and resuming: a program leaves its GPU and comes back, on the same or another."""

import pytest

from phosd.engine import cuda
from phosd.engine.node import Node
from phosd.engine.progress import Progress
from phosd.engine.resume import ResumeOptions, resume
from phosd.engine.suspend import SuspendOptions, suspend
from phosd.engine.swap import SwapOptions, swap
from tests.core.conftest import Starter
from tests.core.cycle import Undisturbed, bring_back, computes_right, save


def free(gpu: int) -> int:
    """Free memory of a software GPU, in bytes."""
    cuda.call("cuCtxSetCurrent", cuda.call("cuDevicePrimaryCtxRetain", gpu))
    return int(cuda.call("cuMemGetInfo")[0])


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("program", ["single", "features"])
def test_off_and_on_again(
    program: str, where: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    before = free(0), free(1)
    target = start(program)
    target.wait_for_steps(5)
    suspended = suspend(node, target.pid, SuspendOptions(where=where), Progress())
    assert (free(0), free(1)) == before
    assert suspended.where == where
    (listed,) = [p for p in node.processes() if p.pid == target.pid]
    assert (listed.state, listed.gpus, listed.device_bytes) == ("suspended", (), 0)
    steps = len(target.values())
    assert resume(node, target.pid, ResumeOptions(), Progress()) == {0: 0}
    target.wait_for_steps(steps + 5)
    suspend(node, target.pid, SuspendOptions(where=where), Progress())
    assert resume(node, target.pid, ResumeOptions("1"), Progress()) == {0: 1}
    computes_right(target, undisturbed)
    (listed,) = [p for p in node.processes() if p.pid == target.pid]
    assert (listed.state, listed.gpus) == ("running", (1,))
    assert not node.shelf(where).list()
    assert not node.suspended.all()


def test_two_programs_take_turns(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    first, second = start("single"), start("features")
    for target in (first, second):
        target.wait_for_steps(3)
    suspend(node, second.pid, SuspendOptions(), Progress())
    for leaving, coming in ((first, second), (second, first), (first, second)):
        leaving.more_steps(2)
        swap(node, leaving.pid, coming.pid, SwapOptions(), Progress())
        states = {p.pid: p.state for p in node.processes()}
        assert (states[leaving.pid], states[coming.pid]) == ("suspended", "running")
        coming.more_steps(2)
    resume(node, first.pid, ResumeOptions("1"), Progress())
    for target in (first, second):
        computes_right(target, undisturbed)


def test_nothing_is_copied_on_the_gpu_when_it_leaves_again(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """What a resume and a restore have loaded is kept: a program whose largest block has no room
    for a second of its size can be suspended, and saved, again and again.
    """
    target = start("single", extra={"PHOS_FAULT": "hook-rehome"})
    for _ in range(2):
        target.more_steps(2)
        suspend(node, target.pid, SuspendOptions(), Progress())
        resume(node, target.pid, ResumeOptions(), Progress())
    image = save(node, target, "stop").id
    target.more_steps(20)
    target.kill()
    bring_back(node, target, image)
    save(node, target, "stop")
    computes_right(target, undisturbed)
