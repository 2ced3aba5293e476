"""Programs that export device memory and keep the descriptor, or that share a memory pool."""

from pathlib import Path

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint, try_checkpoint
from phosd.engine.operations.restore.rehearse import RehearseOptions, rehearse
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.system import procfs
from phosd.engine.system.cuda import is_software
from phosd.errors import Reason, Unsupported
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import (
    AFTER,
    Undisturbed,
    bring_back,
    check,
    computes_right,
    run_cycle,
    save,
)
from tests.support import device_files, harness

PEER = {"PHOS_TEST_PEER": "1"}
KEPT = PEER | {"PHOS_TEST_KEPT": "1"}
POOLS = {"alone": {}, "with a peer": PEER, "with a peer that keeps the descriptor": KEPT}


@pytest.fixture
def device(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that the driver keeps open for pools which it exports."""
    device_files.pretend(place, monkeypatch)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("mode", ["concurrent", "recopy", "stop"])
def test_a_kept_descriptor_names_the_restored_memory(
    node: Node, start: Starter, undisturbed: Undisturbed, mode: str, ahead: bool
) -> None:
    """Also where it is imported, and not mapped yet: its size is what others have of it."""
    target = start("kept_handle", extra={"PHOS_TEST_AHEAD": "1"} if ahead else {})
    manifest = run_cycle(node, target, mode, undisturbed)
    details = manifest.trees[0].details
    assert details is not None and len(details.device_memory) == 1
    rehearse(node, manifest.id, RehearseOptions(), Progress())
    again = save(node, target, mode)  # what was restored is as good
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    check(bring_back(node, target, again.id), original, undisturbed("kept_handle"))


def test_it_is_suspended_before_it_maps_what_it_has_imported(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("kept_handle", extra={"PHOS_TEST_AHEAD": "100"})
    target.wait_for_steps(3)
    suspend(node, target.pid, SuspendOptions(), Progress())
    resume(node, target.pid, ResumeOptions(), Progress())
    target.more_steps(2 * AFTER)  # it has mapped what it had imported before
    computes_right(target, undisturbed)


@pytest.mark.parametrize("which", POOLS)
@pytest.mark.parametrize("mode", ["concurrent", "stop"])
@pytest.mark.usefixtures("device")
def test_an_exportable_pool(node: Node, start: Starter, mode: str, which: str) -> None:
    """The software GPU gives no other process a pool's memory; the hook does."""
    target = start("pool_pair", extra=POOLS[which])
    target.wait_for_steps(5)
    manifest = save(node, target, mode)
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    restored = bring_back(node, target, manifest.id)
    right = harness.undisturbed(
        "pool_pair", 60, extra=POOLS[which], hooked=is_software() and which != "alone"
    )
    check(restored, original, right)


@pytest.mark.usefixtures("device")
def test_a_pool_that_the_hook_cannot_back(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """It is named before the driver is asked, whose checkpoint leaves a device open for it."""
    target = start("pool_pair", extra={"PHOS_TEST_POOL_LIMIT": str(64 << 20)})
    target.wait_for_steps(3)
    opened = [each.number for each in procfs.descriptors(target.pid)]
    (found,) = try_checkpoint(node, target.pid, CheckpointOptions(), Progress())
    for mode in ("auto", "stop", "driver"):
        with pytest.raises(Unsupported, match="a memory pool that can be exported") as refused:
            checkpoint(node, target.pid, CheckpointOptions(mode=mode), Progress())
        assert refused.value.reason == Reason.SHARED_POOL
        assert str(refused.value) == str(found.trouble)
    # Its hook closes the last connection by and by.
    harness.wait_until(
        lambda: [each.number for each in procfs.descriptors(target.pid)] == opened,
        "its descriptors to be those before",
    )
    computes_right(target, undisturbed)
