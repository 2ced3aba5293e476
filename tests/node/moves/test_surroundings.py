"""What surrounds a migration: GPUs that do not reach each other, what the program chose to see."""

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program.process_gpus import gpu_uuids
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.node.moves.random_moves import gpus_of
from tests.support.harness import Target, wait_until


def is_on(node: Node, target: Target, gpu: int) -> None:
    """Wait until the target is listed on this GPU alone: a busy one is not asked for long."""
    wait_until(lambda: gpus_of(node, target) == (gpu,), f"{target.program} on GPU {gpu}")


@pytest.mark.parametrize("program", ["single", "two_devices"])
def test_gpus_that_do_not_reach_each_other(
    program: str,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver copies by way of the host; of the program's memory nothing else is mapped."""
    monkeypatch.setenv("PHOS_SOFTGPU_PEERS", "0")  # for the program, and for movers yet to start
    target = start(program)
    target.wait_for_steps(5)
    for there, back in (("0:1,1:0", "1:0,0:1"),) if program == "two_devices" else (("1", "0"),):
        migrate(node, target.pid, MigrateOptions(there), Progress())
        target.more_steps(3)
        migrate(node, target.pid, MigrateOptions(back), Progress())
    computes_right(target, undisturbed)


@pytest.mark.parametrize("visible", ["0", "1", "1,0", "a UUID"])
def test_what_the_program_chose_to_see(
    visible: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Its device 0 is another GPU of the node, and stays its device 0 wherever it goes."""
    chosen = gpu_uuids()[1] if visible == "a UUID" else visible
    first = 0 if visible == "0" else 1
    target = start("single", extra={"CUDA_VISIBLE_DEVICES": chosen})
    target.wait_for_steps(3)
    is_on(node, target, first)
    there, back = str(1 - first), str(first)
    assert migrate(node, target.pid, MigrateOptions(there), Progress()) == {first: 1 - first}
    is_on(node, target, 1 - first)
    target.more_steps(2)
    suspend(node, target.pid, SuspendOptions(), Progress())
    resume(node, target.pid, ResumeOptions(back), Progress())
    is_on(node, target, first)
    target.more_steps(2)
    migrate(node, target.pid, MigrateOptions(there, mode="driver"), Progress())
    is_on(node, target, 1 - first)
    computes_right(target, undisturbed)
