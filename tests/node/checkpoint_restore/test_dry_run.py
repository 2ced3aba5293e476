"""What would stand in the way of a checkpoint or a restore is told, and nothing is done."""

import os
import re
import signal

from phosd.engine.job.checks import Finding
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.admission import DiskLimits
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint, try_checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore, try_restore
from phosd.errors import Busy, NoSuchProcess, OutOfSpace, Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.support.harness import halt

CHECKS = {"processes", "sandbox", "pid namespace", "other programs", "mode", "memory and disk"}


def by_name(found: list[Finding]) -> dict[str, Finding]:
    assert len({each.what for each in found}) == len(found)
    return {each.what: each for each in found}


def test_a_checkpoint(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("single")
    target.wait_for_steps(3)
    found = by_name(try_checkpoint(node, target.pid, CheckpointOptions(), Progress()))
    assert found.keys() == CHECKS and not any(each.trouble for each in found.values())
    assert found["processes"].text == f"1 in all; with GPU: {target.pid}"
    assert found["mode"].text.startswith("concurrent: the hook can park")
    assert re.fullmatch(r"about [\d.]+ MiB", found["memory and disk"].text)
    assert node.store.list() == []
    bare = start("single", hooked=False)
    bare.wait_for_steps(3)
    found = by_name(try_checkpoint(node, bare.pid, CheckpointOptions(mode="stop"), Progress()))
    assert (
        isinstance(found["mode"].trouble, Unsupported) and "without the hook" in found["mode"].text
    )
    computes_right(target, undisturbed)
    halt(target.pid)
    (stopped,) = try_checkpoint(node, target.pid, CheckpointOptions(), Progress())
    assert isinstance(stopped.trouble, Busy) and "is stopped" in stopped.text
    os.kill(target.pid, signal.SIGCONT)
    computes_right(target, undisturbed)
    (gone,) = try_checkpoint(node, 2**22, CheckpointOptions(), Progress())
    assert isinstance(gone.trouble, NoSuchProcess)


def test_a_quota_counts(node: Node, start: Starter) -> None:
    """As it does for the checkpoint itself."""
    target = start("single")
    target.wait_for_steps(3)
    for quota, kind in ((1 << 20, OutOfSpace), (1 << 40, type(None))):
        options = CheckpointOptions(limits=DiskLimits(quota=lambda _, most=quota: most))  # type: ignore[misc]
        found = by_name(try_checkpoint(node, target.pid, options, Progress()))
        assert isinstance(found["memory and disk"].trouble, kind)
        if quota == 1 << 20:
            assert "that they may" in found["memory and disk"].text


def test_a_restore(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("single")
    target.wait_for_steps(3)
    image = checkpoint(node, target.pid, CheckpointOptions(then="end"), Progress())

    def found() -> dict[str, Finding]:
        return by_name(try_restore(node, image.id, RestoreOptions(), Progress()))

    taken = found()  # by the zombie
    assert [each.what for each in taken.values() if each.trouble] == ["pids"]
    target.kill()
    assert not any(each.trouble for each in found().values())
    log = target.log.rename(target.log.with_suffix(".away"))
    lost = found()
    assert not any(each.trouble for each in lost.values())
    assert f"{target.log}, which is gone, is made anew, empty" in lost["files"].text
    log.rename(target.log)
    restore(node, image.id, RestoreOptions(), Progress())
    computes_right(target, undisturbed)
    running = found()
    assert isinstance(running["pids"].trouble, Busy)
    with node.claim([target.pid]):
        busy = found()
        assert [each.what for each in busy.values() if each.trouble] == ["jobs", "pids"]
