"""Workers forked from a program that uses CUDA, which so have the driver's devices open and mapped.

CRIU alone refuses them. Here the software GPU's device is one that it refuses, too.
"""

from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.errors import Busy
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import (
    AFTER,
    Undisturbed,
    bring_back,
    check,
    computes_right,
    save,
)
from tests.support.device_files import mapped, opened, pretend
from tests.support.harness import alive, children, has_two_gpus, wait_until

CHECKPOINTS = 12


@pytest.fixture
def device(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The device of every program that is started."""
    return pretend(place, monkeypatch)


@pytest.mark.parametrize(
    ("mode", "hooked"), [("stop", True), ("concurrent", True), ("recopy", True), ("driver", False)]
)
def test_they_are_saved_and_restored(
    mode: str,
    hooked: bool,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    device: Path,
) -> None:
    target = start("inheritors", hooked=hooked)
    target.wait_for_steps(5)
    lasting = min(children(target.pid))
    assert mapped(lasting, device)
    assert opened(lasting, device)
    for _ in range(2):  # what was restored can be saved again, and its new workers as well
        manifest = save(node, target, mode)
        target.more_steps(AFTER)
        target.kill()
        original = target.values()
        restored = bring_back(node, target, manifest.id)
        check(restored, original, undisturbed(target.program))
        assert not mapped(lasting, device), "the worker kept the parent's device"
        assert mapped(target.pid, device), "the driver did not open its device again"
    computes_right(target, undisturbed)


def test_they_come_and_go_while_it_is_saved(
    node: Node, start: Starter, undisturbed: Undisturbed, device: Path
) -> None:
    """A checkpoint is complete, or says that a worker ended in it."""
    target = start("inheritors", extra={"PHOS_TEST_PACE": "0.002"})
    target.wait_for_steps(5)
    saved = []
    for number in range(CHECKPOINTS):
        try:
            mode = ("concurrent", "stop", "driver")[number % 3]
            saved.append(checkpoint(node, target.pid, CheckpointOptions(mode=mode), Progress()))
        except Busy as error:
            assert "ended during the checkpoint" in str(error)
        target.more_steps(1)
    assert len(saved) >= CHECKPOINTS // 2
    target.kill()
    bring_back(node, target, saved[-1].id)
    computes_right(target, undisturbed)


def test_they_keep_nothing_of_a_parent_that_leaves(
    node: Node, start: Starter, undisturbed: Undisturbed, device: Path
) -> None:
    target = start("inheritors")
    target.wait_for_steps(5)
    suspend(node, target.pid, SuspendOptions(), Progress())
    assert not mapped(target.pid, device)
    resume(node, target.pid, ResumeOptions(), Progress())
    target.more_steps(2)
    if has_two_gpus():
        assert migrate(node, target.pid, MigrateOptions("1"), Progress()) == {0: 1}
    computes_right(target, undisturbed)


@pytest.mark.parametrize("ends", [False, True])
def test_a_child_that_uses_the_gpu_after_all(
    ends: bool,
    place: Path,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    device: Path,
) -> None:
    """It begins when the others have left the GPU, and would be saved as one that cannot use it.
    phosd sees that at once, unless the child has the device where its parent has it.
    """
    told = place / "told"
    target = start("latecomer", arguments=("0", str(told)))
    target.wait_for_steps(3)
    (child,) = children(target.pid)

    def meanwhile(progress: Progress) -> None:
        phase = progress.phases[-1].name if progress.phases else ""
        if phase == "cpu" and alive(child) and not told.exists() and not mapped(child, device):
            whole = told.with_suffix(".whole")
            whole.write_text("end" if ends else "")
            whole.rename(told)
            wait_until(lambda: not told.exists(), "the child to use the GPU")
        if phase == "unpark" and ends and alive(child):
            told.touch()
            wait_until(lambda: not alive(child), "the child's end")

    progress = Progress(observer=meanwhile)
    options = CheckpointOptions(mode="stop")
    if ends:  # in the second attempt it is one that has ended
        try:
            checkpoint(node, target.pid, options, progress)
        except Busy as error:
            assert "began to use the GPU" in str(error)
            told.touch()
            wait_until(lambda: not alive(child), "the child's end")
            checkpoint(node, target.pid, options, Progress())
        else:
            assert any(f"tried again: process {child} ended" in each for each in progress.notes)
    else:
        with pytest.raises(Busy, match="began to use the GPU"):
            checkpoint(node, target.pid, options, progress)
        assert node.store.list() == []
    computes_right(target, undisturbed)
