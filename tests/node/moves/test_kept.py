"""What a suspended program had on its GPU is kept, whatever else goes wrong."""

import json
import os
import shutil
from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program import driver_checkpoint
from phosd.engine.recovery.startup import settle
from phosd.engine.system import memory_mount
from tests.node.checkpoint_restore.conftest import Starter, named_shelf
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.support.harness import Target


def asleep(node: Node, start: Starter, where: str = "memory") -> Target:
    target = start("single")
    target.wait_for_steps(3)
    suspend(node, target.pid, SuspendOptions(where=where), Progress())
    return target


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_its_file_cannot_be_read(
    where: str, place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    """A phosd of another version has perhaps written it."""
    config = NodeConfig(place / "state", place / "run")
    with Node(config) as node:
        target = asleep(node, start, where)
        (file,) = (place / "run" / "suspended").glob("*.json")
        known = file.read_text()
        file.write_text(json.dumps(json.loads(known) | {"by_a_later_version": 1}))
    with Node(config) as node:
        settle(node, [])
    file.write_text(known)
    with Node(config) as node:
        resume(node, target.pid, ResumeOptions(), Progress())
        computes_right(target, undisturbed)


def test_a_phosd_with_another_runtime_folder(
    place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    with Node(NodeConfig(place / "state", place / "run")) as node:
        target = asleep(node, start, "disk")
    with Node(NodeConfig(place / "state", place / "elsewhere")) as node:
        settle(node, [])
    with Node(NodeConfig(place / "state", place / "run")) as node:
        resume(node, target.pid, ResumeOptions(), Progress())
        computes_right(target, undisturbed)


def test_the_driver_tells_nothing_of_it(
    place: Path, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = NodeConfig(place / "state", place / "run")
    with Node(config) as node:
        target = asleep(node, start)
    with Node(config) as node:
        with monkeypatch.context() as patch:
            patch.setattr(driver_checkpoint, "state", lambda pid: None)
            settle(node, [])
        resume(node, target.pid, ResumeOptions(), Progress())
        computes_right(target, undisturbed)


def test_no_user_is_in_the_way(
    place: Path, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever they have at a name in /dev/shm that anybody can compute, and whether phosd can
    mount something or not. Nothing is put into a folder of theirs.
    """
    run, theirs = place / "run", place / "theirs"
    run.mkdir()
    name = named_shelf(run)
    target = start("single")
    target.wait_for_steps(3)
    for kind in ("link", "folder"):
        for can_mount in (True, False):
            made = theirs if kind == "link" else name
            made.mkdir(mode=0o777)
            os.chown(made, 65534, 65534)
            if kind == "link":
                name.symlink_to(theirs)
                os.chown(name, 65534, 65534, follow_symlinks=False)
            try:
                with monkeypatch.context() as patch:
                    if not can_mount:
                        patch.setattr(memory_mount, "mount", lambda _folder: "not permitted")
                    suspend_and_resume(NodeConfig(place / "state", run), target)
            finally:
                left = [theirs, *name.parent.glob(f"{name.name}*")]
                content = [[*each.iterdir()] for each in left if each.is_dir()]
                for each in left:
                    each.unlink() if each.is_symlink() else shutil.rmtree(each, ignore_errors=True)
            assert not any(content)
    computes_right(target, undisturbed)


def suspend_and_resume(config: NodeConfig, target: Target) -> None:
    with Node(config) as node:
        node.suspend_store.sweep()
        kept = suspend(node, target.pid, SuspendOptions(), Progress())
        assert kept.where == "memory"
        resume(node, target.pid, ResumeOptions(), Progress())
