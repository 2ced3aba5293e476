"""A restore is rehearsed while the program runs, which notices nothing."""

import pytest

from phosd.engine import CheckpointOptions, Node, Progress, checkpoint
from phosd.engine.operations.rehearse import RehearseOptions, rehearse
from phosd.engine.system import pid_namespaces
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right


@pytest.mark.parametrize("mode", ["stop", "driver"])
def test_while_the_original_runs_and_after_it(
    node: Node, start: Starter, undisturbed: Undisturbed, mode: str
) -> None:
    target = start("single")
    target.wait_for_steps(3)
    image = checkpoint(node, target.pid, CheckpointOptions(mode=mode), Progress()).id
    progress = Progress()
    rehearse(node, image, RehearseOptions(), progress)
    assert [phase.name for phase in progress.phases] == ["admission", "load", "files", "cpu"]
    computes_right(target, undisturbed)
    target.kill()
    rehearse(node, image, RehearseOptions(), Progress())
    assert not [*pid_namespaces.living(node.config.runtime_dir)]
