"""A program in a runc container is suspended, resumed and moved from outside of it."""

from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from tests.node.checkpoint_restore.cycle import Undisturbed, computed_right
from tests.node.containers.conftest import seen
from tests.support import containers


@pytest.mark.parametrize("user_namespace", [False, True])
def test_suspended_moved_and_right(
    user_namespace: bool, node: Node, place: Path, undisturbed: Undisturbed
) -> None:
    """Also if its root is nobody's outside."""
    with containers.run_by_runc("single", place, user_namespace=user_namespace) as target:
        target.wait_for_steps(3)
        found = seen(node, target.pid)
        assert found.gpus == (0,)
        assert found.uid == (containers.FIRST_MAPPED if user_namespace else 0)
        for to in ("1", "0"):
            assert migrate(node, target.pid, MigrateOptions(to), Progress())
            target.more_steps(2)
            suspend(node, target.pid, SuspendOptions(), Progress())
            position = target.position()
            resume(node, target.pid, ResumeOptions(), Progress())
            target.wait_for_steps(2, since=position)
    computed_right(target, undisturbed)
