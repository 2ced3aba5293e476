"""Programs in pid namespaces of their own: saved in them, and restored in new ones."""

import os
import signal
from functools import partial

import pytest

from phosd.engine import (
    CheckpointOptions,
    Node,
    Progress,
    RestoreOptions,
    checkpoint,
    restore,
    try_restore,
)
from phosd.engine.program.namespace_maker import end
from phosd.engine.system import pid_namespaces, procfs
from phosd.engine.system.pid_namespaces import PidNamespace
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed
from tests.support.harness import wait_until
from tests.support.pids import occupy, release

NEW = RestoreOptions(pid_namespace=True)
MODES = ["stop", "concurrent", "recopy", "driver"]


def _is_over(namespace: PidNamespace) -> bool:
    return not namespace.lives


@pytest.mark.parametrize("mode", MODES)
def test_restored_while_its_pids_are_taken_and_saved_and_restored_again(
    node: Node, start: Starter, undisturbed: Undisturbed, mode: str
) -> None:
    """Whatever its pids are outside, for itself it has the old ones."""
    target = start("single")
    target.wait_for_steps(5)
    options = CheckpointOptions(mode=mode)
    image = checkpoint(node, target.pid, options, Progress())
    target.kill()
    ours = procfs.namespace(os.getpid(), "pid")
    holder = occupy(target.pid)
    try:
        for _ in range(2):
            found = try_restore(node, image.id, NEW, Progress())
            assert not [each for each in found if each.trouble]
            mark = target.position()
            result = restore(node, image.id, NEW, Progress())
            assert procfs.own_id(result.pid) == target.pid != result.pid
            assert procfs.namespace(result.pid, "pid") != ours
            assert result.pid in [each.pid for each in node.processes()]
            computed = target.wait_for_steps(AFTER, since=mark)
            right = undisturbed("single", max(computed) + 1)
            assert computed == {step: right[step] for step in computed}
            image = checkpoint(node, result.pid, options, Progress())
            assert image.trees[0].pid_namespace
            assert (image.processes[0].pid, image.processes[0].known_as) == (target.pid, result.pid)
            (made,) = pid_namespaces.living(node.config.runtime_dir)
            assert made.has(result.pid)
            os.kill(result.pid, signal.SIGKILL)
            wait_until(partial(_is_over, made), "the namespace to end with its program")
    finally:
        release(holder)
        for left in pid_namespaces.living(node.config.runtime_dir):
            end(left)
