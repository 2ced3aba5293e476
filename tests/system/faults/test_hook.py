"""Every fault point of the hook, every kind: steps fail in the program itself, their answers get
lost, or the program is killed, or hangs there until it is killed.

What must hold afterwards is what test_matrix.py says. A program that is killed has an end; another
one ran beside it all the while, and the next job is its.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from phosd.engine.faults import Kind, Point
from phosd.engine.hook_client.link import HookLink
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.support.harness import SELDOM, Target, alive, wait_until
from tests.system.faults.case import ENDING, FAILING, HOOK, Case, played
from tests.system.faults.daemon_under_fault import Plant, eventually_alone

PART = 4
"""One in so many pairs of a point and a kind is played by each commit."""
SLOW = "30M"
"""Bytes a second that the movers copy while the program has not written what is not saved yet."""
STEPS = 4
"""Steps in which it does."""


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
    plant.settings = 'shadow_limit = "4 MiB"'


@pytest.fixture(autouse=True)
def brake(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file: while it exists, movers of the daemons that are started in a test are slow."""
    monkeypatch.setenv("PHOS_SOFTGPU_COPY_RATE", SLOW)
    monkeypatch.setenv("PHOS_SOFTGPU_COPY_RATE_WHILE", str(place / "brake"))
    return place / "brake"


def begin_slowly(plant: Plant, target: Target, mode: str, brake: Path) -> str:
    """Begin a checkpoint in which the target makes :data:`STEPS` steps while it is copied, unless
    it ends before, or the job does.
    """
    brake.touch()
    job = plant.checkpoint(target.pid, mode)

    def over() -> bool:
        return not alive(target.pid) or hangs(target.pid) or plant.state(job) != "running"

    wait_until(lambda: over() or plant.phase_of(job) == "drain" or mode == "driver", "the drain")
    since = target.position()
    wait_until(
        lambda: len(target.values(since)) >= STEPS or over() or mode == "driver", "steps beside it"
    )
    brake.unlink()
    return job


@pytest.mark.parametrize("kind", FAILING)
def test_a_step_of_the_hook_fails(
    kind: Kind, plant: Plant, faulty: Faulty, right: Undisturbed, brake: Path
) -> None:
    """All points are armed in the program; each job meets the first that is left."""
    target = faulty([f"{point}:1:{kind}" for point in played(HOOK, kind, PART)])
    case = Case(plant, target, right, kind)
    plant.start()
    left = {*played(HOOK, kind, PART)}
    while left:
        # What the hook imported becomes the program's own when phosd does not keep it.
        mode = "driver" if left == {Point.HOOK_REHOME} else "concurrent"
        for _ in range(3):  # after one that failed, a job may save everything inside the stop
            outcome = plant.end_of(begin_slowly(plant, target, mode, brake))
            if met := met_by(plant, target) & left:
                break
        assert met, f"no {kind} at {left}: {outcome}, {plant.last()}"
        case.require_well(sorted(met))
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
    kind: Kind,
    plant: Plant,
    faulty: Faulty,
    start: Starter,
    undisturbed: Undisturbed,
    brake: Path,
) -> None:
    plant.start()
    bystander = start("single", extra=SELDOM)
    for point in played(HOOK, kind, PART):
        target = faulty([f"{point}:1:{kind}"])
        mode = "driver" if point is Point.HOOK_REHOME else "concurrent"
        if point is Point.HOOK_REHOME:  # there must be something that was imported
            assert plant.end_of(plant.checkpoint(target.pid, "concurrent")) == "done"
        for _ in range(4):  # a job that needs no shadow, say, does not come to the point
            try:
                job = begin_slowly(plant, target, mode, brake)
            except RuntimeError:  # a moment after the end of a job that did not wait for it
                assert not alive(target.pid), plant.last()
                break
            if not alive(target.pid) or hangs(target.pid) or plant.end_of(job) != "done":
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
        case.require_well([point])
        assert case.save() == "done", (point, plant.last())
    case.require_images_whole()
    plant.stop()
    eventually_alone(plant)


def hangs(pid: int) -> bool:
    """Whether a thread of the process has met a fault that lets it hang."""
    for name in Path(f"/proc/{pid}/task").glob("*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if name.read_text() == "phos-hangs\n":
                return True
    return False
