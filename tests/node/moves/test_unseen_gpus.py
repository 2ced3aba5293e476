"""A program on a GPU that it did not see when it was started gets copies of its memory back."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.memory import handing_back
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.recovery.guarded import left_parked
from phosd.engine.recovery.startup import settle
from phosd.engine.system.cuda import is_software
from phosd.errors import PhosError, Reason, Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, computes_right
from tests.support.gpu_memory import taken
from tests.support.harness import Target

pytestmark = pytest.mark.usefixtures("two_gpus")


def away(node: Node, start: Starter, **extra: str) -> Target:
    """A target that sees GPU 0 only, on GPU 1."""
    target = start("single", extra={"CUDA_VISIBLE_DEVICES": "0", **extra})
    target.wait_for_steps(3)
    assert migrate(node, target.pid, MigrateOptions("1"), Progress()) == {0: 1}
    target.more_steps(2)
    return target


@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
def test_it_is_saved_there_and_restored(
    full: bool,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where its memory and a copy do not fit on the GPU, it goes by way of the host."""
    by_way_of_the_host = Mock(wraps=handing_back._make_by_way_of_the_host)
    monkeypatch.setattr(handing_back, "_make_by_way_of_the_host", by_way_of_the_host)
    target = away(node, start)
    with taken(1) if full else nullcontext():
        image = checkpoint(node, target.pid, CheckpointOptions(), Progress())
        target.more_steps(AFTER)
    assert image.mode == "recopy"
    if is_software():  # a real GPU has more to spare than the target needs
        assert by_way_of_the_host.called == full
    computes_right(target, undisturbed)
    target.kill()
    for gpu in "0", "1":
        restore(node, image.id, RestoreOptions(gpu=f"1:{gpu}"), Progress())
        target.more_steps(2)
        computes_right(target, undisturbed)
        target.kill()


def test_copy_on_write_is_refused(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = away(node, start)
    with pytest.raises(Unsupported, match="did not see when it was started"):
        checkpoint(node, target.pid, CheckpointOptions(mode="concurrent"), Progress())
    migrate(node, target.pid, MigrateOptions("0"), Progress())
    checkpoint(node, target.pid, CheckpointOptions(mode="concurrent"), Progress())
    computes_right(target, undisturbed)


@pytest.mark.parametrize("visit", [1, 2])
def test_making_its_memory_fails(
    visit: int, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start(
        "single", extra={"CUDA_VISIBLE_DEVICES": "0", "PHOS_FAULT": f"hook-make:{visit}"}
    )
    target.wait_for_steps(3)
    suspend(node, target.pid, SuspendOptions(), Progress())
    with pytest.raises(PhosError, match="making of block"):
        resume(node, target.pid, ResumeOptions("1"), Progress())
    assert resume(node, target.pid, ResumeOptions(), Progress()) == {0: 1}
    computes_right(target, undisturbed)
    assert not left_parked(node.config.runtime_dir)


KILLED = """
import pathlib, sys
from phosd.engine import CheckpointOptions, Node, NodeConfig, Progress, checkpoint
place = pathlib.Path(sys.argv[1])
with Node(NodeConfig(place / "state", place / "run")) as node:
    checkpoint(node, int(sys.argv[2]), CheckpointOptions(mode="stop"), Progress())
"""


def test_the_engine_is_killed_while_it_is_parked(
    place: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    config = NodeConfig(place / "state", place / "run")
    with Node(config) as node:
        target = away(node, start)
    fault = os.environ | {"PHOS_FAULT": "checkpoint-unpark:kill"}
    words = [sys.executable, "-c", KILLED, str(place), str(target.pid)]
    assert subprocess.run(words, env=fault, timeout=60).returncode == -signal.SIGKILL
    with Node(config) as node:
        settle(node, [])
        target.more_steps(AFTER)
        assert not left_parked(config.runtime_dir)
        computes_right(target, undisturbed)
        image = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress())
        target.kill()
        restore(node, image.id, RestoreOptions(), Progress())
        target.more_steps(AFTER)
    computes_right(target, undisturbed)


def test_processes_that_share_memory_stay(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """Each would have memory of its own there."""
    pair = start("shared_pair", extra={"CUDA_VISIBLE_DEVICES": "0"})
    pair.wait_for_steps(3)
    with pytest.raises(Unsupported, match="does not see GPU 1") as refused:
        migrate(node, pair.pid, MigrateOptions("1"), Progress())
    assert refused.value.reason == Reason.SHARED_MEMORY
    image = checkpoint(node, pair.pid, CheckpointOptions(mode="stop"), Progress())
    suspend(node, pair.pid, SuspendOptions(), Progress())
    with pytest.raises(Unsupported, match="does not see GPU 1"):
        resume(node, pair.pid, ResumeOptions("1"), Progress())
    resume(node, pair.pid, ResumeOptions(), Progress())
    computes_right(pair, undisturbed)
    pair.kill()
    with pytest.raises(Unsupported, match="does not see GPU 1"):
        restore(node, image.id, RestoreOptions(gpu="1"), Progress())
    restore(node, image.id, RestoreOptions(), Progress())
    pair.more_steps(AFTER)
    computes_right(pair, undisturbed)
