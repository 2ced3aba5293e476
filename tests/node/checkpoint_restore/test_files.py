"""Files that a program writes to, and that an image has not."""

import pytest

from phosd.engine.criu.dump import written_files
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right


@pytest.mark.parametrize("mode", ["stop", "driver"])
def test_those_that_are_too_large_are_named(
    mode: str,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(written_files, "MOST_WRITTEN", 10)
    target = start("stateful")
    target.wait_for_steps(3)
    progress = Progress()
    checkpoint(node, target.pid, CheckpointOptions(mode=mode), progress)
    noted = target.log.parent / "noted"
    (told,) = [note for note in progress.notes if "too large" in note]
    assert told == f"{noted} is not saved with the image: it is too large"
    computes_right(target, undisturbed)
