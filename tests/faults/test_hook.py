"""Every fault point of the hook, every kind: steps fail in the program itself, their answers get
lost, or the program is killed, or hangs there until it is killed.

What must hold afterwards is what test_matrix.py says. A program that is killed has an end; another
one ran beside it all the while, and the next job is its.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from phosd.engine.faults import Kind, Point
from phosd.engine.hooklink import HookLink
from tests.core.conftest import Starter
from tests.core.cycle import Undisturbed
from tests.faults.case import ENDING, FAILING, HOOK, SELDOM, Case
from tests.faults.plant import Plant, eventually_alone
from tests.harness import Target, alive, wait_until

SLOW = "80M"
"""Bytes a second that the movers copy: the program writes to what is not saved yet."""


Faulty = Callable[[Sequence[str]], Target]


@pytest.fixture
def faulty(start: Starter, surroundings: dict[str, str]) -> Faulty:
    """Starts a program that has these faults and writes most of its memory with each step."""

    def starter(faults: Sequence[str]) -> Target:
        extra = {**surroundings, "PHOS_FAULT": ",".join(faults)}
        target = start("right", arguments=("0", "by_value"), extra=extra)
        target.more_steps(3)  # its log may be an earlier one's, too
        return target

    return starter


@pytest.fixture
def right(variant_undisturbed: Undisturbed) -> Undisturbed:
    """What that program computes when nothing goes wrong."""
    return partial(variant_undisturbed, variant="by_value")


@pytest.fixture(autouse=True)
def no_room(plant: Plant) -> None:
    """For a snapshot: the hook has something to do."""
    (plant.place / "phosd.toml").write_text('shadow_limit = "4 MiB"\n')


@pytest.fixture(autouse=True)
def slow_movers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the daemons that are started in a test."""
    monkeypatch.setenv("PHOS_SOFTGPU_COPY_RATE", SLOW)


@pytest.mark.parametrize("kind", FAILING)
def test_a_step_of_the_hook_fails(
    kind: Kind, plant: Plant, faulty: Faulty, right: Undisturbed
) -> None:
    """All points are armed in the program; each job meets the first that is left."""
    target = faulty([f"{point}:1:{kind}" for point in HOOK])
    case = Case(plant, target, right, kind)
    plant.start()
    left = set(HOOK)
    while left:
        # What the hook imported becomes the program's own when phosd does not keep it.
        mode = "driver" if left == {Point.HOOK_REHOME} else "concurrent"
        for _ in range(5):  # copying may be over before a busy machine's program writes
            outcome = case.save(mode)
            if met := met_by(plant, target) & left:
                break
        assert met, f"no {kind} at {left}: {outcome}"
        case.require_well(sorted(met), outcome)
        left -= met
    assert case.save("concurrent") == "done", plant.last()
    case.require_images_whole()
    plant.stop()
    eventually_alone(plant)


def met_by(plant: Plant, target: Target) -> set[Point]:
    """The points at which something went wrong in the program, which its log tells."""
    with HookLink(target.pid, plant.place / "run") as link:
        said = link.stats()
    return {point for point in HOOK if f"fault point {point}\n" in said + "\n"}


@pytest.mark.parametrize("kind", ENDING)
def test_the_program_ends_in_the_hook(
    kind: Kind, plant: Plant, faulty: Faulty, start: Starter, undisturbed: Undisturbed
) -> None:
    plant.start()
    bystander = start("single", extra=SELDOM)
    for point in HOOK:
        target = faulty([f"{point}:1:{kind}"])
        mode = "driver" if point is Point.HOOK_REHOME else "concurrent"
        if point is Point.HOOK_REHOME:  # there must be something that was imported
            assert plant.end_of(plant.checkpoint(target.pid, "concurrent")) == "done"
        for _ in range(5):  # copying may be over before a busy machine's program writes
            job = plant.checkpoint(target.pid, mode)
            look = partial(met_or_missed, plant, job, target)
            if wait_until(look, f"{kind} at {point}") == "met":
                break
        if kind is Kind.HANG:
            wait_until(lambda: hangs(target.pid), f"a hang at {point}")  # noqa: B023
            target.kill()
        else:
            wait_until(lambda: not alive(target.pid), f"the end at {point}")  # noqa: B023
        outcome = plant.end_of(job)
        # Its memory is that of the stop, and is copied when the program runs again, or has ended.
        late = point in (Point.HOOK_OPEN, Point.HOOK_SHADOW, Point.HOOK_DISARM)
        assert outcome == "failed" or (late and outcome == "done"), (point, plant.last())
        if outcome == "failed":
            assert f"process {target.pid}" in plant.last()["message"], plant.last()
        case = Case(plant, bystander, undisturbed, kind)
        case.require_well([point], outcome)
        assert case.save() == "done", (point, plant.last())
    case.require_images_whole()
    plant.stop()
    eventually_alone(plant)


def met_or_missed(plant: Plant, job: str, target: Target) -> str:
    """Whether the program has met its fault, or the job was done without; "" before either."""
    done = plant.state(job) == "done"
    if done:
        time.sleep(1)  # some faults come with the last request of a job
    if hangs(target.pid) or not alive(target.pid):
        return "met"
    return "missed" if done else ""


def hangs(pid: int) -> bool:
    """Whether a thread of the process has met a fault that lets it hang."""
    for name in Path(f"/proc/{pid}/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if name.read_text() == "phos-hangs\n":
                return True
    return False
