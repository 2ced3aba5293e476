"""A restore is rehearsed while the program runs, which notices nothing."""

import pytest

from phosd.engine import CheckpointOptions, Node, Progress, RestoreOptions, checkpoint, restore
from phosd.engine.criu.restore.restored_processes import RestoredProcesses
from phosd.engine.image.packs import HEADER
from phosd.engine.operations import admission
from phosd.engine.operations.restore import rehearse as module
from phosd.engine.operations.restore.rehearse import RehearseOptions, rehearse
from phosd.engine.program.process import uses_cuda
from phosd.engine.system import pid_namespaces
from phosd.errors import ImageCorrupt, OutOfMemory
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.node.checkpoint_restore.test_bad_images import flip


@pytest.mark.parametrize("mode", ["stop", "driver"])
def test_while_the_original_runs_and_after_it(
    node: Node, start: Starter, undisturbed: Undisturbed, mode: str
) -> None:
    target = start("single")
    target.wait_for_steps(3)
    image = checkpoint(node, target.pid, CheckpointOptions(mode=mode), Progress()).id
    progress = Progress()
    rehearse(node, image, RehearseOptions(), progress)
    assert [phase.name for phase in progress.phases] == ["admission", "load", "files", "cpu"]
    computes_right(target, undisturbed)
    target.kill()
    rehearse(node, image, RehearseOptions(), Progress())
    assert not [*pid_namespaces.living(node.config.runtime_dir)]


def test_what_would_fail_is_named(node: Node, start: Starter, undisturbed: Undisturbed) -> None:
    """Damage of the device memory, which the GPU finds, and of CRIU's files, also where the GPU has
    no room.
    """
    target = start("single")
    target.wait_for_steps(3)
    image = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress()).id
    (core,) = node.store.image_folder(image).glob(f"criu-0/core-{target.pid}.img")
    flip(core, 100)
    with pytest.raises(ImageCorrupt, match="core-"):
        rehearse(node, image, RehearseOptions(), Progress())
    flip(core, 100)
    pack = max(node.config.state_dir.glob("packs/*.pack"), key=lambda path: path.stat().st_size)
    flip(pack, pack.stat().st_size // 2 + HEADER)
    with pytest.raises(ImageCorrupt, match="pack"):
        rehearse(node, image, RehearseOptions(), Progress())
    flip(pack, pack.stat().st_size // 2 + HEADER)
    rehearse(node, image, RehearseOptions(), Progress())
    computes_right(target, undisturbed)


def test_without_room_beside_the_original_the_memory_is_hashed_by_the_cpu(
    node: Node, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = start("single")
    target.wait_for_steps(3)
    image = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress()).id

    def no_room(*_: object) -> None:
        raise OutOfMemory("GPU 0 has no room", hint="end something")

    monkeypatch.setattr(module, "require_device_memory", no_room)
    progress = Progress()
    rehearse(node, image, RehearseOptions(), progress)
    assert "hashed on the CPU only: GPU 0 has no room" in progress.notes[0]
    pack = max(node.config.state_dir.glob("packs/*.pack"), key=lambda path: path.stat().st_size)
    flip(pack, pack.stat().st_size // 2 + HEADER)
    with pytest.raises(ImageCorrupt, match="pack"):
        rehearse(node, image, RehearseOptions(), Progress())


def test_its_processes_are_no_programs(
    node: Node, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not listed while they are there; a rule would save them."""
    target = start("single")
    target.wait_for_steps(3)
    image = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress()).id
    seen = []
    ids = RestoredProcesses.ids

    def look(made: RestoredProcesses) -> dict[int, int]:
        found = ids(made)
        if found:
            assert uses_cuda(found[target.pid])
            seen.append([each.pid for each in node.processes()])
        return found

    monkeypatch.setattr(RestoredProcesses, "ids", look)
    rehearse(node, image, RehearseOptions(), Progress())
    assert seen and all(pids == [target.pid] for pids in seen)


def test_neither_a_clone_nor_a_rehearsal_takes_the_memory_of_the_original(
    node: Node, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = start("single")
    target.wait_for_steps(3)
    image = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress()).id
    monkeypatch.setattr(admission, "available_memory", lambda: 1 << 20)
    with pytest.raises(OutOfMemory, match="the host has"):
        rehearse(node, image, RehearseOptions(), Progress())
    with pytest.raises(OutOfMemory, match="the host has"):
        restore(node, image, RestoreOptions(clone="a"), Progress())
