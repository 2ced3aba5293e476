"""Migration: a program goes on, on another GPU, and computes what it computes undisturbed."""

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.migrate import MigrateOptions, migrate
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, computed_right
from tests.support.harness import Target


def gpus(node: Node, target: Target) -> tuple[int, ...]:
    """The GPUs on which the target has memory."""
    (found,) = [p for p in node.processes() if p.pid == target.pid]
    return found.gpus


@pytest.mark.parametrize("program", ["single", "threads", "features", "churn", "capture"])
def test_there_and_back(program: str, node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start(program)
    target.wait_for_steps(5)
    assert gpus(node, target) == (0,)
    assert migrate(node, target.pid, MigrateOptions("1"), Progress()) == {0: 1}
    assert gpus(node, target) == (1,)
    target.more_steps(5)
    assert migrate(node, target.pid, MigrateOptions("0"), Progress()) == {1: 0}
    assert gpus(node, target) == (0,)
    target.more_steps(AFTER)
    target.kill()  # one of them has a thread that spins
    computed_right(target, undisturbed)
