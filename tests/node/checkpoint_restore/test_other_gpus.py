"""A restore on GPUs other than those of the image: the program computes what it would have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phosd.engine import Node
from phosd.engine.image.manifest import Manifest
from phosd.engine.job.progress import Progress
from phosd.engine.mover.client.mover import ROOM
from phosd.engine.node.gpus import list_gpus
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.restore import restore as restore_module
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore, try_restore
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program import driver_checkpoint
from phosd.engine.system.cuda import is_software
from phosd.errors import Internal, InvalidOption, OutOfMemory
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, check, save
from tests.support.gpu_memory import taken
from tests.support.harness import Target, alive, moved_to

MODES = ["concurrent", "driver"]
pytestmark = pytest.mark.usefixtures("two_gpus")


def gpus(node: Node, target: Target) -> tuple[int, ...]:
    """The GPUs on which the target has memory."""
    (found,) = [each for each in node.processes() if each.pid == target.pid]
    return found.gpus


def saved(node: Node, target: Target, mode: str, parent: str = "") -> Manifest:
    """An image of the target, which has gone on since, and was killed."""
    options = CheckpointOptions(mode=mode, parent=parent)
    image = checkpoint(node, target.pid, options, Progress())
    target.more_steps(AFTER)
    target.kill()
    return image


def restored(
    node: Node, target: Target, image: Manifest, gpu: str
) -> tuple[dict[int, str], Progress]:
    """Restore the target on these GPUs; return what it computes then."""
    mark, progress = target.position(), Progress()
    assert restore(node, image.id, RestoreOptions(gpu=gpu), progress).pid == target.pid
    return target.wait_for_steps(AFTER, since=mark), progress


def come_back(
    node: Node, target: Target, image: Manifest, gpu: str, undisturbed: Undisturbed
) -> Progress:
    """Restore the target on these GPUs; it goes on from the image, and computes what is right."""
    original = target.values()
    values, progress = restored(node, target, image, gpu)
    check(values, original, undisturbed(target.program, max(values) + 1, compared=target))
    return progress


def test_another_gpu_and_back(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """And all that can be done with a program there, too."""
    target = start("single")
    target.wait_for_steps(5)
    first = saved(node, target, "concurrent")
    told = come_back(node, target, first, "1", undisturbed)
    assert "GPU 1 in place of GPU 0" in told.notes and gpus(node, target) == (1,)
    suspend(node, target.pid, SuspendOptions(), Progress())
    resume(node, target.pid, ResumeOptions(gpu="0"), Progress())
    migrate(node, target.pid, MigrateOptions("1"), Progress())
    second = saved(node, target, "concurrent", parent=first.id)
    assert [gpu.ordinal for gpu in second.gpus if gpu.used] == [1]
    told = come_back(node, target, second, "", undisturbed)
    assert not told.notes and gpus(node, target) == (1,)
    target.kill()
    come_back(node, target, second, "1:0", undisturbed)
    assert gpus(node, target) == (0,)


@pytest.mark.parametrize("mode", MODES)
def test_two_gpus_change_places(
    mode: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = start("two_devices")
    target.wait_for_steps(5)
    image = saved(node, target, mode)
    come_back(node, target, image, "0:1,1:0", undisturbed)
    assert gpus(node, target) == (0, 1)
    come_back(node, target, saved(node, target, mode), "", undisturbed)


def test_a_driver_that_does_not_do_as_it_is_told(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs reach each other's memory, so the program itself would not notice."""
    target = start("single")
    target.wait_for_steps(5)
    image = saved(node, target, "stop")
    do = driver_checkpoint.resume
    with monkeypatch.context() as patch:
        patch.setattr(driver_checkpoint, "resume", lambda pids, pairs: do(pids))
        with pytest.raises(Internal, match=r"on GPU 0 instead of GPU 1"):
            restore(node, image.id, RestoreOptions(gpu="1"), Progress())
    assert not alive(target.pid)
    come_back(node, target, image, "1", undisturbed)


def test_without_the_hook(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    target = start("single", hooked=False)
    target.wait_for_steps(5)
    image = saved(node, target, "driver")
    assert restored_on(node, target, image, moved_to(1), undisturbed) == {1}
    image = saved(node, target, "auto")
    assert restored_on(node, target, image, "", undisturbed) == {1}


def restored_on(
    node: Node, target: Target, image: Manifest, gpu: str, undisturbed: Undisturbed
) -> set[int]:
    """Restore it there; the GPUs on which anybody sees the target then."""
    come_back(node, target, image, gpu, undisturbed)
    return {each.ordinal for each in list_gpus() if target.pid in each.pids}


def test_a_gpu_with_room_is_found(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = start("single")
    target.wait_for_steps(5)
    image = saved(node, target, "stop")
    assert target.pid not in {each.pid for each in node.processes()}  # lets go of its memory
    # NVIDIA's driver needs some to take the program from there.
    left = 0 if is_software() else ROOM
    with taken(0, but=left):
        (found,) = [
            each
            for each in try_restore(node, image.id, RestoreOptions(), Progress())
            if each.what == "GPUs"
        ]
        assert found.text == "GPU 1 in place of GPU 0"
        with pytest.raises(OutOfMemory, match=r"GPU 0 has .* free, image .* needs .* in place"):
            restore(node, image.id, RestoreOptions(gpu="0"), Progress())
        original = target.values()
        values, _ = restored(node, target, image, "")
    assert gpus(node, target) == (1,)
    # On GPU 0, which had no room for it until now.
    check(values, original, undisturbed(target.program, max(values) + 1, compared=target))
    target.kill()
    assert target.pid not in {each.pid for each in node.processes()}
    with taken(), pytest.raises(OutOfMemory, match=r"GPU 0 has .*, GPU 1 has .* free, image"):
        restore(node, image.id, RestoreOptions(), Progress())

    affected = restore_module._affected
    with monkeypatch.context() as patch, taken(0, but=left):  # taken after its admission

        def late(*arguments: object) -> object:
            patch.setattr(restore_module, "_affected", affected)
            neighbour.__enter__()
            return affected(*arguments)  # type: ignore[arg-type]

        neighbour = taken(1)
        patch.setattr(restore_module, "_affected", late)
        try:
            with pytest.raises(OutOfMemory):
                restore(node, image.id, RestoreOptions(), Progress())
        finally:
            neighbour.__exit__(None, None, None)
        assert not any(map(alive, target.pids))
        original = target.values()
        values, _ = restored(node, target, image, "")
    check(values, original, undisturbed(target.program, max(values) + 1, compared=target))


def test_gpus_that_will_not_do(node: Node, start: Starter) -> None:
    target = start("single", extra={"CUDA_VISIBLE_DEVICES": "1"})
    target.wait_for_steps(3)
    image = save(node, target, "stop")
    target.kill()
    for gpu, why in (
        ("0:1", "names no GPU of the program of image"),
        ("1:7", "'7' names no GPU of this node"),
        ("0,1", "does not use GPU|names GPU 1 twice"),
    ):
        with pytest.raises(InvalidOption, match=why):
            restore(node, image.id, RestoreOptions(gpu=gpu), Progress())


MACHINE = """
import pathlib, sys
from phosd.engine import CheckpointOptions, Node, NodeConfig, Progress, RestoreOptions
from phosd.engine import checkpoint, restore
place, what, which, how = pathlib.Path(sys.argv[1]), *sys.argv[2:]
with Node(NodeConfig(place / "state", place / "run")) as node:
    if what == "save":
        print(checkpoint(node, int(which), CheckpointOptions(mode=how), Progress()).id)
    else:
        progress = Progress()
        restore(node, which, RestoreOptions(gpu=how), progress)
        print(*progress.notes)
"""
"""Saves a process in a mode, or restores an image on GPUs, on a machine of its own."""


class Machine:
    """A machine with so many software GPUs, whose UUIDs no other machine has."""

    def __init__(self, place: Path, name: str, gpus: int, **others: str) -> None:
        self._place = place
        self.settings = {
            "PHOS_SOFTGPU_MACHINE": name,
            "PHOS_SOFTGPU_DEVICES": str(gpus),
            "PHOS_SOFTGPU_DIR": str(place / "gpu"),
            **others,
        }

    def run(self, what: str, which: object, how: str) -> str:
        command = [sys.executable, "-c", MACHINE, str(self._place), what, str(which), how]
        surroundings = os.environ | self.settings
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def save(self, target: Target, mode: str) -> str:
        image = self.run("save", target.pid, mode)
        target.more_steps(AFTER)
        target.kill()
        return image

    def restore(self, target: Target, image: str, gpu: str, undisturbed: Undisturbed) -> str:
        original, mark = target.values(), target.position()
        told = self.run("restore", image, gpu)
        values = target.wait_for_steps(AFTER, since=mark)
        check(values, original, undisturbed(target.program, max(values) + 1, compared=target))
        return told


@pytest.mark.skipif(not is_software(), reason="real GPUs cannot be configured")
@pytest.mark.parametrize("mode", MODES)
def test_other_machines(mode: str, place: Path, start: Starter, undisturbed: Undisturbed) -> None:
    """With more GPUs, with as many, and not with fewer; none of them has the GPUs of another."""
    small, large = Machine(place, "small", 1), Machine(place, "large", 4)
    target = start("single", extra=small.settings)
    target.wait_for_steps(5)
    image = small.save(target, mode)
    assert "GPU 3 in place of GPU 0" in large.restore(target, image, "3", undisturbed)
    image = large.save(target, "driver" if mode == "driver" else "auto")
    with pytest.raises(AssertionError, match=r"GpuMismatch: .* with 4 GPUs, here is 1"):
        small.run("restore", image, "")
    Machine(place, "other", 4).restore(target, image, "", undisturbed)


@pytest.mark.skipif(not is_software(), reason="real GPUs cannot be configured")
def test_two_of_four(place: Path, start: Starter, undisturbed: Undisturbed) -> None:
    machine = Machine(place, "", 4)
    target = start("two_devices", extra=machine.settings)
    target.wait_for_steps(5)
    image = machine.save(target, "concurrent")
    strange = Machine(place, "strange", 4, PHOS_SOFTGPU_CHIP="Another chip")
    with pytest.raises(AssertionError, match=r"GpuMismatch: .* here are 0 Another chip"):
        strange.run("restore", image, "")
    machine.restore(target, image, "0:3,1:2", undisturbed)
