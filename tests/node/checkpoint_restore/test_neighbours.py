"""Programs that leave one GPU and come to it at the same time: each gets its room back."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.criu.dump.dump import Dump
from phosd.engine.criu.run.page_store import PageStore
from phosd.engine.criu.run.program import Criu
from phosd.engine.image.verify import verify
from phosd.engine.job.progress import Progress
from phosd.engine.node import staging
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.migrate import MigrateOptions, migrate
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.engine.program import driver_checkpoint
from phosd.engine.program.tree import ProcessTree
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import (
    Undisturbed,
    all_compute_right,
    computes_right,
    run_cycle,
    save,
)
from tests.node.checkpoint_restore.test_trouble import at_phase
from tests.support.gpu_memory import taken
from tests.support.harness import Target


def together(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Both programs have done a driver step before either job goes on, if they may."""
    both = threading.Barrier(2)
    real: Callable[[int], None] = getattr(driver_checkpoint, step)

    def stepped(pid: int) -> None:
        real(pid)
        with suppress(threading.BrokenBarrierError):  # the other waits for its turn
            both.wait(1)

    monkeypatch.setattr(driver_checkpoint, step, stepped)


def test_two_checkpoints_at_once(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed("single")  # needs a GPU with room
    targets = start("single"), start("single")
    for target in targets:
        target.wait_for_steps(3)
    for target in targets:  # whatever the movers need they have then
        checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress())
    together(monkeypatch, "checkpoint")
    away, back = threading.Barrier(2), threading.Event()
    order: list[int] = []

    def save(target: Target) -> None:
        """The first whose room is kept comes back last."""

        def dumped(progress: Progress) -> None:
            order.append(target.pid)
            away.wait(30)
            if order[0] == target.pid:
                back.wait(30)

        progress = at_phase("cpu", dumped)
        try:
            checkpoint(node, target.pid, CheckpointOptions(mode="stop"), progress)
        finally:
            back.set()

    with taken(0), ThreadPoolExecutor(2) as pool:
        list(pool.map(save, targets))
    all_compute_right(undisturbed, *targets)


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("mode", ["concurrent", "recopy", "stop", "driver"])
def test_a_neighbour_takes_all_memory(
    mode: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """As a phase begins, whichever: the program is saved, since the mover has kept what the driver
    needs, and computes on.
    """
    target = start("single")
    target.wait_for_steps(3)
    whole = Progress()
    checkpoint(node, target.pid, CheckpointOptions(mode=mode), whole)
    node.movers.close()
    node.movers.mover(0)  # which has been asked for nothing yet
    for number in range(1, len(whole.phases) + 1):
        with ExitStack() as neighbours:
            came: list[str] = []

            def take(progress: Progress) -> None:
                if len(progress.phases) == number and not came:  # noqa: B023
                    came.append(progress.phases[-1].name)  # noqa: B023
                    neighbours.enter_context(taken(0))

            progress = Progress(observer=take)
            image = checkpoint(node, target.pid, CheckpointOptions(mode=mode), progress).id
            target.more_steps(2)
        assert came == [whole.phases[number - 1].name]
        verify(node.store, image, Progress())
    computes_right(target, undisturbed)


@pytest.mark.parametrize("how", ["migrate", "resume", "restore"])
def test_nobody_comes_while_another_leaves(
    how: str, node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    """What it takes then would count as what the other still has."""
    target = start("single")
    target.wait_for_steps(3)
    gpu, image = 1, ""
    if how == "resume":
        suspend(node, target.pid, SuspendOptions(), Progress())
    if how == "restore":
        gpu, image = 0, save(node, target, "stop").id
        target.kill()
    about_to = threading.Event()
    progress = at_phase("control", lambda _: about_to.set())

    def come() -> None:
        if how == "migrate":
            migrate(node, target.pid, MigrateOptions("1"), progress)
        elif how == "resume":
            resume(node, target.pid, ResumeOptions("1"), progress)
        else:
            restore(node, image, RestoreOptions(), progress)

    assert node.gpu_locks.acquire({gpu})
    with ThreadPoolExecutor(1) as pool:
        try:
            job = pool.submit(come)
            assert about_to.wait(30)
            time.sleep(1)
            assert not job.done()
        finally:
            node.gpu_locks.release({gpu})
        job.result()
    computes_right(target, undisturbed)


def test_a_neighbour_takes_the_host_memory(
    node: Node, start: Starter, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the taking: then CRIU's files go to the disk, not to what is left."""
    target = start("single")
    folders: list[Path] = []

    def full(folder: Path, byte_count: int) -> None:
        folders.append(folder)

    monkeypatch.setattr(PageStore, "if_there_is_room", full)
    dumped: list[Path] = []
    began = Dump.__init__

    def begin(self: Dump, criu: Criu, tree: ProcessTree, folder: Path, *rest: Any) -> None:
        dumped.append(folder)
        began(self, criu, tree, folder, *rest)

    monkeypatch.setattr(Dump, "__init__", begin)
    run_cycle(node, target, "concurrent", undisturbed)
    assert [folder.parent for folder in folders] == [staging.MEMORY]
    assert [folder.is_relative_to(node.store.disk.images) for folder in dumped] == [True]
    assert not folders[0].exists()
