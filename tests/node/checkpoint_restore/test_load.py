"""What a restore has loaded and its program does not take is free again."""

import os
import signal
from collections.abc import Mapping, Sequence

import pytest

from phosd.engine.hook_client.link import HookLink
from phosd.engine.job.progress import Progress
from phosd.engine.memory.device_memory import DeviceMemory
from phosd.engine.memory.exported import Allocation
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.node import Node
from phosd.engine.operations.restore import load
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.errors import NoSuchProcess, OutOfMemory
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import save
from tests.node.checkpoint_restore.test_fault_points import forgotten
from tests.support.harness import alive, wait_until

_hold = DeviceMemory.hold


def killed_first(
    memory: DeviceMemory, link: HookLink, allocations: Mapping[int, Allocation]
) -> None:
    """The owner ends the program just before its hook is asked for its blocks."""
    os.kill(link.pid, signal.SIGKILL)
    wait_until(lambda: not alive(link.pid), "its end")
    _hold(memory, link, allocations)


def told_of_one(
    memory: DeviceMemory, link: HookLink, allocations: Mapping[int, Allocation]
) -> None:
    """The hook lists fewer blocks than it was given: it is the program's owner who decides that."""
    first = min(allocations)
    _hold(memory, link, {first: allocations[first]})


def test_a_program_ends_as_it_takes_its_memory(
    node: Node, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could do so again and again, until the GPU is full."""
    image = _image_of_a_dead(node, start)
    free = node.movers.mover(0).free_memory()[0]
    monkeypatch.setattr(DeviceMemory, "hold", killed_first)
    with pytest.raises(NoSuchProcess):
        restore(node, image, RestoreOptions(), Progress())
    assert node.movers.mover(0).free_memory()[0] == free


def test_a_hook_does_not_tell_of_all_its_memory(
    node: Node, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = _image_of_a_dead(node, start)
    free = node.movers.mover(0).free_memory()[0]
    monkeypatch.setattr(DeviceMemory, "hold", told_of_one)
    result = restore(node, image, RestoreOptions(), Progress())
    os.kill(result.pid, signal.SIGKILL)

    def all_free() -> bool:
        return node.movers.mover(0).free_memory()[0] == free

    wait_until(all_free, "its memory to be free")


def test_the_memory_runs_out_while_some_of_it_is_loaded(
    node: Node, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour may take it after the checks."""
    image = _image_of_a_dead(node, start)
    free = node.movers.mover(0).free_memory()[0]
    create = Mover.create
    groups = []

    def until_full(
        mover: Mover, blocks: Sequence[tuple[int, int]], *, host: Sequence[int] = ()
    ) -> list[int]:
        groups.append(blocks)
        if len(groups) == 2:
            raise OutOfMemory("cuMemCreate failed")
        return create(mover, blocks, host=host)

    monkeypatch.setattr(load, "_FIRST_GROUP", 1)
    monkeypatch.setattr(Mover, "create", until_full)
    with pytest.raises(OutOfMemory, match="cuMemCreate"):
        restore(node, image, RestoreOptions(), Progress())
    assert len(groups) == 2
    assert node.movers.mover(0).free_memory()[0] == free


def _image_of_a_dead(node: Node, start: Starter) -> str:
    target = start("single")
    target.wait_for_steps(3)
    image = save(node, target, "stop").id
    target.kill()
    wait_until(lambda: forgotten(node), "the end of its watch")
    return image
