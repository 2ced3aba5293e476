"""Programs on one GPU that are copied one after the other: none stands still for another one."""

import random
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.mover.client.mover import Mover
from phosd.engine.node.node import Node
from phosd.engine.operations.checkpoint import CheckpointOptions, checkpoint
from phosd.engine.operations.restore.options import RestoreOptions
from phosd.engine.operations.restore.restore import restore
from phosd.engine.operations.resume import ResumeOptions, resume
from phosd.engine.operations.suspend import SuspendOptions, suspend
from phosd.errors import Cancelled
from tests.node.concurrent.conftest import Starter, Undisturbed
from tests.node.concurrent.test_guesses import continues
from tests.support.harness import Target, wait_until

COPYING = {
    "stop": ["quiesce", "digest", "drain"],
    "recopy": ["quiesce", "park", "control", "cpu", "unpark"],
    "concurrent": ["quiesce", "drain", "park", "control", "cpu", "unpark"],
}
"""The phases in which a checkpoint has its turn to copy, by mode."""


def saved(mode: str) -> Callable[[Node, int, Progress], object]:
    options = CheckpointOptions(mode=mode, fallback="none")
    return lambda node, pid, progress: checkpoint(node, pid, options, progress)


JOBS: dict[str, Callable[[Node, int, Progress], Any]] = {mode: saved(mode) for mode in COPYING} | {
    "suspend": lambda node, pid, progress: suspend(node, pid, SuspendOptions(), progress)
}


def started(start: Starter) -> Target:
    target = start("single")
    target.wait_for_steps(5)
    return target


def waits(progress: Progress) -> None:
    wait_until(lambda: progress.notes, "the job to wait for its turn")
    assert progress.notes == ["the memory of another program on GPU 0 is copied first"]


@pytest.mark.parametrize("snapshots", [True, False], ids=["snapshot", "on_write"])
@pytest.mark.parametrize("mode", COPYING)
def test_nobody_else_copies_until_all_is_copied(mode: str, node: Node, start: Starter) -> None:
    target = started(start)
    free: dict[str, bool] = {}

    def look(progress: Progress) -> None:
        if ours := node.movers._copying.acquire({0}):
            node.movers._copying.release({0})
        free[progress.phases[-1].name] = ours

    checkpoint(node, target.pid, CheckpointOptions(mode=mode, fallback="none"), Progress(look))
    assert [name for name, ours in free.items() if not ours] == COPYING[mode]


@pytest.mark.parametrize("job", JOBS)
def test_who_waits_for_its_turn_runs_on(
    job: str,
    node: Node,
    start: Starter,
    undisturbed: Undisturbed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has pinned no host memory either, which a mover that copies may need."""
    target = started(start)
    pins: list[int] = []
    pin = Mover.pin

    def counted(mover: Mover, packs: Iterable[int]) -> int:
        pins.append(len(given := list(packs)))
        return pin(mover, given)

    monkeypatch.setattr(Mover, "pin", counted)
    progress, cancelled = Progress(), Progress()
    with ThreadPoolExecutor(1) as pool:
        with node.movers.turn_to_copy({0}, Progress()):
            running = pool.submit(JOBS[job], node, target.pid, cancelled)
            waits(cancelled)
            cancelled.cancel()
            with pytest.raises(Cancelled):
                running.result()
            running = pool.submit(JOBS[job], node, target.pid, progress)
            waits(progress)
            target.more_steps(20)
            assert not any(phase.stopped for phase in progress.phases)
            assert pins == []
        result = running.result()
    assert len(pins) == (job != "suspend")
    if job == "suspend":
        resume(node, target.pid, ResumeOptions(), Progress())
        result = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress())
    continues(node, target, result.id, undisturbed("single"))


def test_what_is_loaded_waits_for_its_turn(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    target = started(start)
    image = checkpoint(node, target.pid, CheckpointOptions(mode="stop"), Progress())
    target.kill()
    progress = Progress()
    with ThreadPoolExecutor(1) as pool:
        with node.movers.turn_to_copy({0}, Progress()):
            running = pool.submit(restore, node, image.id, RestoreOptions(), progress)
            waits(progress)
            assert progress.phases[-1].name == "load"
        running.result()
    continues(node, target, image.id, undisturbed("single"))


def test_three_programs_are_saved_and_suspended_at_the_same_time(
    node: Node, start: Starter, undisturbed: Undisturbed
) -> None:
    programs = ("single", ""), ("right", "by_value"), ("caching", "")
    targets = [start(*program, PHOS_TEST_PACE="0.05") for program in programs]
    for target in targets:
        target.wait_for_steps(5)

    def work(target: Target) -> None:
        chance = random.Random(target.program)
        for _ in range(8):
            job = chance.choice([*JOBS])
            JOBS[job](node, target.pid, Progress())
            if job == "suspend":
                resume(node, target.pid, ResumeOptions(), Progress())

    with ThreadPoolExecutor(len(targets)) as pool:
        list(pool.map(work, targets))
    for target, program in zip(targets, programs, strict=True):
        target.more_steps(2)
        target.kill()
        values = target.values()
        right = undisturbed(*program, steps=max(values) + 1)
        assert values == {step: right[step] for step in values}
