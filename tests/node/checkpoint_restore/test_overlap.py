"""CRIU works while the device memory is loaded, and nothing runs before that is complete."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from phosd.engine import Node, Progress, RestoreOptions, restore
from phosd.engine.criu.run.action_script import MADE, RESTORED, ActionScript
from phosd.engine.mover.client.mover import Mover
from phosd.errors import Cancelled, ImageCorrupt
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, save
from tests.support.harness import Target, alive, wait_until


@dataclass
class Slow:
    """Loading that ends when it is let, with ``error`` if there is one."""

    let: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    scripts: list[ActionScript] = field(default_factory=list)

    def reached(self, where: str) -> bool:
        return any(where in script.reached for script in self.scripts)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow()
    load, attend = Mover.load, ActionScript.attend

    def later(mover: Mover, plan: Any, image: Any, progress: Progress, *, arriving: bool) -> None:
        while not made.let.wait(0.01):
            progress.check()
        if made.error is not None:
            raise made.error
        load(mover, plan, image, progress, arriving=arriving)

    def attended(script: ActionScript) -> None:
        made.scripts.append(script)
        attend(script)

    monkeypatch.setattr(Mover, "load", later)
    monkeypatch.setattr(ActionScript, "attend", attended)
    yield made
    made.let.set()


@pytest.fixture
def saved(node: Node, start: Starter) -> tuple[Target, str]:
    target = start("single")
    target.wait_for_steps(5)
    image = save(node, target, "stop")
    target.kill()
    return target, image.id


def test_it_waits_for_the_memory(
    node: Node, saved: tuple[Target, str], slow: Slow, undisturbed: Undisturbed
) -> None:
    target, image = saved
    before, progress = target.values(), Progress()
    mark = target.position()
    with ThreadPoolExecutor(1) as beside:
        restored = beside.submit(restore, node, image, RestoreOptions(), progress)
        wait_until(lambda: slow.reached(MADE), "CRIU to have made the program")
        assert progress.phases[-1].name == "load" and alive(target.pid)
        assert target.values() == before and not slow.reached(RESTORED)
        slow.let.set()
        assert restored.result().pid == target.pid
    computed = target.wait_for_steps(AFTER, since=mark)
    right = undisturbed("single", max(computed) + 1)
    assert computed == {step: right[step] for step in computed}


@pytest.mark.parametrize("how", ["damaged", "cancelled"])
def test_what_was_made_goes_again_if_the_memory_does_not_come(
    node: Node, saved: tuple[Target, str], slow: Slow, how: str
) -> None:
    target, image = saved
    before, progress = target.values(), Progress()
    slow.error = ImageCorrupt("chunk 7 is not what was saved")
    with ThreadPoolExecutor(1) as beside:
        restored = beside.submit(restore, node, image, RestoreOptions(), progress)
        wait_until(lambda: slow.reached(MADE), "CRIU to have made the program")
        if how == "damaged":
            slow.let.set()
        else:
            progress.cancel()
        with pytest.raises(ImageCorrupt if how == "damaged" else Cancelled):
            restored.result()
    assert not alive(target.pid)
    assert target.values() == before and not slow.reached(RESTORED)
    slow.error = None
    slow.let.set()
    assert restore(node, image, RestoreOptions(), Progress()).pid == target.pid
