"""Programs that export device memory and keep the descriptor."""

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.restore.rehearse import RehearseOptions, rehearse
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import (
    AFTER,
    Undisturbed,
    bring_back,
    check,
    run_cycle,
    save,
)


@pytest.mark.parametrize("mode", ["concurrent", "recopy", "stop"])
def test_a_kept_descriptor_names_the_restored_memory(
    node: Node, start: Starter, undisturbed: Undisturbed, mode: str
) -> None:
    target = start("kept_handle")
    manifest = run_cycle(node, target, mode, undisturbed)
    details = manifest.trees[0].details
    assert details is not None and len(details.device_memory) == 1
    rehearse(node, manifest.id, RehearseOptions(), Progress())
    again = save(node, target, mode)  # what was restored is as good
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    check(bring_back(node, target, again.id), original, undisturbed("kept_handle"))
