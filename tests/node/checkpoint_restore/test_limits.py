"""What an image may take is known before the program is stopped, and held to afterwards."""

import pytest

from phosd.engine.image.usage import Usage
from phosd.engine.job.progress import Progress
from phosd.engine.node.node import Node
from phosd.engine.operations.admission import DiskLimits, SizeOrShare
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.operations.swap import SwapOptions, swap
from phosd.errors import OutOfSpace
from phosd.units import human_bytes
from tests.node.checkpoint_restore.conftest import Starter
from tests.support.samples import everything


def of_all(quota: int) -> DiskLimits:
    return DiskLimits(quota=lambda user: quota)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (of_all(1 << 20), r"the images of uid 0 take 0 B of the 1\.0 MiB that they may"),
        (DiskLimits(SizeOrShare(size=1 << 60)), r"of which .* stay free \(min_free\)"),
        (DiskLimits(SizeOrShare(share=0.9999)), r"of which .* stay free \(min_free\)"),
    ],
)
def test_a_checkpoint_beyond_a_limit_is_refused_before_the_stop(
    node: Node, start: Starter, limits: DiskLimits, message: str
) -> None:
    target = start("single")
    target.wait_for_steps(2)
    progress = Progress()
    with pytest.raises(OutOfSpace, match=message):
        checkpoint(node, target.pid, CheckpointOptions(mode="stop", limits=limits), progress)
    assert [phase.name for phase in progress.phases] == ["prepare"]
    assert progress.stop_seconds == 0
    assert everything(node.store.state) == set()
    target.more_steps(2)


def test_images_and_suspended_programs_count_together(node: Node, start: Starter) -> None:
    first, second = start("single"), start("single")
    for target in (first, second):
        target.wait_for_steps(2)
    image = checkpoint(node, first.pid, CheckpointOptions(mode="stop"), Progress())
    taken = Usage([image]).total
    little = of_all(taken + (1 << 18))
    progress = Progress()
    message = "the images and suspended programs of uid 0 take"
    with pytest.raises(OutOfSpace, match=message):
        suspend(node, first.pid, SuspendOptions(limits=little), progress)
    assert progress.stop_seconds == 0
    assert node.suspend_store.taken(0) == 0
    first.more_steps(2)
    node.store.delete(image.id)
    # The data alone fit, and then no image beside them.
    suspended = suspend(node, first.pid, SuspendOptions(limits=little), Progress())
    assert node.suspend_store.taken(0) == suspended.stored_bytes > 1 << 18
    with pytest.raises(OutOfSpace, match=f"{message} {human_bytes(suspended.stored_bytes)}"):
        checkpoint(node, second.pid, CheckpointOptions(mode="stop", limits=little), Progress())
    less = of_all(suspended.stored_bytes + (1 << 18))
    with pytest.raises(OutOfSpace, match=message):
        suspend(node, second.pid, SuspendOptions(limits=less), Progress())
    # What is resumed gives its room to what takes its place.
    swap(node, second.pid, first.pid, SwapOptions(limits=less), Progress())
    swap(node, first.pid, second.pid, SwapOptions(limits=less), Progress())
    resume(node, first.pid, ResumeOptions(), Progress())
    assert node.suspend_store.taken(0) == 0
    first.more_steps(2)


def test_a_child_is_measured_by_what_it_stores(node: Node, start: Starter) -> None:
    target = start("single")
    target.wait_for_steps(2)
    first = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress())
    taken = Usage([first]).total
    again = CheckpointOptions(mode="stop", parent=first.id, limits=of_all(taken + (1 << 18)))
    progress = Progress()
    with pytest.raises(OutOfSpace, match=f"delete {first.id}"):
        checkpoint(node, target.pid, again, progress)
    assert node.store.list() == [first]
    target.more_steps(2)
    room = CheckpointOptions(mode="stop", parent=first.id, limits=of_all(4 * taken))
    child = checkpoint(node, target.pid, room, Progress())
    assert Usage([first, child]).total < 4 * taken
    target.more_steps(2)
