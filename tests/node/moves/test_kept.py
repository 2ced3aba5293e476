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
from phosd.errors import NotAuthorized
from tests.node.checkpoint_restore.conftest import Starter, memory_shelf
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


def test_somebody_else_has_made_the_folder_in_memory(
    place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    """Anybody may make one in /dev/shm."""
    run = place / "run"
    run.mkdir()
    folder = memory_shelf(run)
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    try:
        with Node(NodeConfig(place / "state", run)) as node:
            target = start("single")
            target.wait_for_steps(3)
            with pytest.raises(NotAuthorized, match=str(folder)):
                suspend(node, target.pid, SuspendOptions(where="memory"), Progress())
            suspend(node, target.pid, SuspendOptions(where="auto"), Progress())
            assert [each.where for each in node.suspended.living()] == ["disk"]
            resume(node, target.pid, ResumeOptions(), Progress())
            computes_right(target, undisturbed)
    finally:
        shutil.rmtree(folder)
