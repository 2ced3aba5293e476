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
from phosd.engine.program.name import VARIABLE
from phosd.engine.program.namespace_maker import end
from phosd.engine.system import pid_namespaces, procfs
from phosd.engine.system.pid_namespaces import PidNamespace
from phosd.errors import Busy
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed
from tests.support.harness import wait_until
from tests.support.pids import occupy, release

NEW = RestoreOptions(pid_namespace=True)
MODES = ["stop", "concurrent", "recopy", "driver"]


def _is_over(namespace: PidNamespace) -> bool:
    return not namespace.lives


def _refused_beside(node: Node, image: str, pid: int) -> None:
    """A restore says which process has to end, and so does a dry run; a clone may be made."""
    found = {each.what: each.trouble for each in try_restore(node, image, NEW, Progress())}
    assert isinstance(found["original"], Busy) and f"runs: pid {pid} (" in str(found["original"])
    with pytest.raises(Busy, match=rf"the program of image {image} runs: pid {pid} \("):
        restore(node, image, NEW, Progress())
    beside = RestoreOptions(clone="c")
    assert "original" not in {e.what for e in try_restore(node, image, beside, Progress())}


def test_any_image_of_a_name_waits_for_its_program_but_not_for_clones(
    node: Node, start: Starter
) -> None:
    """The one that runs was restored from a later image, and nothing else ties it to this one."""
    target = start("single", extra={VARIABLE: "trial"})
    target.wait_for_steps(3)
    first = checkpoint(node, target.pid, CheckpointOptions(), Progress())
    second = checkpoint(node, target.pid, CheckpointOptions(), Progress())
    target.kill()
    try:
        result = restore(node, second.id, NEW, Progress())
        _refused_beside(node, first.id, result.pid)
        (made,) = pid_namespaces.living(node.config.runtime_dir)
        end(made)
        clone = restore(node, first.id, RestoreOptions(clone="c"), Progress())
        found = {each.what: each.trouble for each in try_restore(node, first.id, NEW, Progress())}
        assert "original" in found and found["original"] is None, f"the clone {clone.pid} may run"
    finally:
        for left in pid_namespaces.living(node.config.runtime_dir):
            end(left)


@pytest.mark.parametrize("mode", MODES)
def test_restored_while_its_pids_are_taken_and_saved_and_restored_again(
    node: Node, start: Starter, undisturbed: Undisturbed, mode: str
) -> None:
    """Whatever its pids are outside, for itself it has the old ones."""
    target = start("single")
    target.wait_for_steps(5)
    options = CheckpointOptions(mode=mode)
    image = checkpoint(node, target.pid, options, Progress())
    _refused_beside(node, image.id, target.pid)
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
            for each in node.store.list():
                if made.image == each.id or each.id == image.id:
                    _refused_beside(node, each.id, result.pid)
            os.kill(result.pid, signal.SIGKILL)
            wait_until(partial(_is_over, made), "the namespace to end with its program")
    finally:
        release(holder)
        for left in pid_namespaces.living(node.config.runtime_dir):
            end(left)
