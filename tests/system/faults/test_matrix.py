"""Every fault point of phosd and of its movers, every kind: what goes wrong there, and that all is
well afterwards.

After each fault: the program runs and computes what it should, nothing of an unfinished image can
be seen, the job has a final state with a reason, every image is whole, and a new job succeeds. A
point lies in phosd or in a mover: that one fails, is killed, or hangs until it is killed, as a
watchdog does it.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from phosd.engine.faults import Kind, Point
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.support import harness
from tests.support.harness import SELDOM, Target, alive, has_two_gpus, wait_until
from tests.system.faults.case import (
    CHECKPOINT,
    DELETE,
    ENDING,
    FAILING,
    MIGRATE,
    RESTORE,
    RESUME,
    SAFE_POINT,
    SUSPEND,
    WRITE_BACK,
    Case,
    played,
)
from tests.system.faults.daemon_under_fault import (
    DIED,
    Plant,
    eventually_alone,
    leftovers,
    wait_for_fault,
)

PART = 8
"""One in so many pairs of a point and a kind is played by each commit."""


@pytest.fixture
def case(
    plant: Plant, start: Starter, undisturbed: Undisturbed, request: pytest.FixtureRequest
) -> Iterator[Case]:
    target = start("single", extra=SELDOM)
    target.wait_for_steps(3)
    yield Case(plant, target, undisturbed, request.param)
    plant.stop()
    eventually_alone(plant)


def fired(plant: Plant, since: bytes) -> list[Point]:
    """The points that were met since then."""
    said = plant.said(since).decode()
    return [point for point in Point if f"fault point {point}: " in said]


def tell(case: Case, met: Sequence[Point]) -> None:
    """Print a line of the table of faults: where, what, and how phosd reports the job."""
    last = case.plant.last()
    print(
        f"{case.kind} at {', '.join(met)}: {last['operation']} {last['state']}: {last['message']}"
    )


@pytest.mark.parametrize("case", FAILING, ids=str, indirect=True)
def test_a_step_fails(case: Case) -> None:
    """All points of a kind of job are armed; each job meets the first that are left."""
    plant = case.plant
    fetch = (Point.MOVER_FETCH,)  # each new mover meets it again, and none comes further
    work = (
        (CHECKPOINT, case.save),
        ([point for point in MIGRATE if point not in fetch], case.move),
        (fetch, case.move),
        ((*SUSPEND, *RESUME), case.nap),
        (RESTORE, case.restore),
        (DELETE, case.delete),
    )
    for points, job in work:
        points = played(points, case.kind, PART)
        if not points or (job == case.move and not has_two_gpus()):
            continue
        plant.start(",".join(f"{point}:1:{case.kind}" for point in points))
        left = {*points}
        while left:
            before = plant.said()
            outcome = job()
            met = fired(plant, before)
            assert left & {*met}, f"no {case.kind} at {left}: {outcome}, {plant.last()}"
            tell(case, met)
            runs = not case.asleep and (job != case.restore or outcome == "done")
            case.require_well(met, runs=runs)
            left -= {*met}
        plant.stop()
        plant.start()
        assert job() == "done", plant.last()
        plant.stop()
    plant.start()
    assert case.save() == "done", plant.last()
    case.require_images_whole()


@pytest.mark.parametrize("case", ENDING, ids=str, indirect=True)
@pytest.mark.parametrize(
    "points",
    [CHECKPOINT, (*RESTORE, *DELETE), MIGRATE, (*SUSPEND, *RESUME)],
    ids=["checkpoint", "restore and delete", "migrate", "suspend and resume"],
)
def test_a_process_ends(
    points: Sequence[Point], case: Case, request: pytest.FixtureRequest
) -> None:
    if points is MIGRATE:
        request.getfixturevalue("two_gpus")
    plant = case.plant
    plant.start()
    assert case.save() == "done"
    for point in played(points, case.kind, PART):
        plant.stop()
        plant.start(f"{point}:1:{case.kind}")
        meet(case, point)
        plant.stop()
        plant.start()
        tell(case, [point])
        assert not leftovers(plant.place), point
        if point in RESTORE:
            restored = [pid for pid in case.target.pids if alive(pid)]
            assert not restored or plant.last()["message"].count("runs")
            assert case.restore() == "done", (point, plant.last())
        elif point in DELETE:
            case.require_images_whole()
        if case.asleep:
            assert case.nap() == "done", (point, plant.last())
        case.require_well([point])
        assert case.save() == "done", (point, plant.last())
        assert plant.verify(plant.images()[-1]) == "done", point
    case.require_images_whole()


@pytest.mark.rotated(of=5)
@pytest.mark.parametrize("case", [*FAILING, *ENDING], ids=str, indirect=True)
def test_a_snapshot_fails(case: Case) -> None:
    """While the program stands still, and its memory is the mover's. One that was copied in half is
    found out, and the job goes on without it.
    """
    plant, fault = case.plant, Point.MOVER_FETCH
    plant.start(f"{fault}:1:{case.kind}")
    before = plant.said()
    job = plant.checkpoint(case.target.pid, "concurrent")
    wait_for_fault(plant, before, fault)
    if case.kind is Kind.HANG:
        for mover in plant.movers():
            os.kill(mover, signal.SIGKILL)
    outcome = plant.end_of(job)
    if case.kind is Kind.SHORT:
        found = outcome, plant.last()["mode"]
        assert found == ("done", "recopy"), plant.said().decode(errors="replace")
    else:
        assert outcome == "failed"
    plant.stop()
    plant.start()
    case.require_well([fault])
    assert case.save("concurrent") == "done", plant.last()
    case.require_images_whole()


@pytest.mark.rotated(of=5)
@pytest.mark.parametrize("case", [*FAILING, *ENDING], ids=str, indirect=True)
@pytest.mark.parametrize("fault", WRITE_BACK)
def test_writing_to_the_disk_fails(fault: Point, case: Case) -> None:
    """The image stays in memory, and the next phosd writes it."""
    plant = case.plant
    plant.settings = 'memory_tier = "256 MiB"'
    plant.start(f"{fault}:1:{case.kind}")
    before = plant.said()
    job = plant.checkpoint(case.target.pid, "stop", durable=True)
    wait_for_fault(plant, before, fault)
    if case.kind is Kind.HANG:
        plant.kill()
    outcome = plant.end_of(job)
    if case.kind in ENDING:
        assert outcome == DIED
    else:  # phosd writes it beside the job, and either of the two may have met the fault
        assert outcome in ("done", "failed")
        assert [plant.verify(image) for image in plant.images()] == ["done"]
    plant.stop()
    plant.start()
    (image,) = plant.images()
    wait_until(lambda: plant.durable(image), "the image to be on the disk")
    case.require_well([fault])
    assert case.save_durably() == "done", plant.last()
    assert plant.durable(plant.images()[-1])
    case.require_images_whole()
    plant.stop()
    assert not (plant.place / "run/memory").is_mount()


def values(program: str, steps: int = 60, compared: Target | None = None) -> dict[int, str]:
    """What the program of the next test computes undisturbed."""
    return harness.undisturbed(program, steps, "passes", compared=compared)


@pytest.mark.rotated(of=5)
@pytest.mark.parametrize("kind", [*FAILING, *ENDING], ids=str)
@pytest.mark.parametrize("fault", SAFE_POINT)
def test_a_program_is_not_left_at_its_safe_point(
    fault: Point, kind: Kind, plant: Plant, start: Starter
) -> None:
    """Whatever becomes of the job that wants it there: it is wanted there no longer."""
    target = start("safe_points", arguments=("0", "passes"))
    target.wait_for_steps(3)
    case = Case(plant, target, values, kind)
    plant.start(f"{fault}:1:{kind}")
    before = plant.said()
    job = plant.checkpoint(target.pid, "stop")
    wait_for_fault(plant, before, fault)
    if kind is Kind.HANG:
        plant.kill()
    assert plant.end_of(job) == (
        DIED if kind in ENDING else "done" if kind is Kind.SHORT else "failed"
    )
    target.more_steps(2)
    plant.stop()
    plant.start()
    case.require_well([fault])
    assert case.save() == "done", plant.last()
    case.require_well([fault])
    case.require_images_whole()
    plant.stop()
    eventually_alone(plant)


def meet(case: Case, point: Point) -> None:
    """Let a job meet the fault, and end as it must."""
    plant, before = case.plant, case.plant.said()
    if point in DELETE:
        meet_deleting(case, point, before)
        return
    if point in RESTORE:
        case.target.kill()
        job = plant.begin("Restore", "sa{sv}", plant.images()[-1], 0)
    elif point in MIGRATE:
        job = case.begin_move()
    elif point in RESUME:
        assert plant.end_of(case.begin_nap()) == "done", plant.last()
        job = case.begin_waking()
    elif point in SUSPEND:
        job = case.begin_nap()
    else:
        job = plant.checkpoint(case.target.pid, "stop")
    wait_for_fault(plant, before, point)
    if case.kind is Kind.HANG:
        if point.startswith("mover-"):
            for mover in plant.movers():
                os.kill(mover, signal.SIGKILL)
        else:
            plant.kill()
    outcome = plant.end_of(job)
    if point.startswith("mover-"):
        assert outcome == "failed"
        assert "data mover" in str(plant.last()["message"])
    else:
        assert outcome == DIED


def meet_deleting(case: Case, point: Point, before: bytes) -> None:
    """As :func:`meet`; the call itself waits for the end."""
    plant = case.plant
    with ThreadPoolExecutor(1) as beside:
        answer = beside.submit(case.delete)
        wait_for_fault(plant, before, point)
        if case.kind is Kind.HANG:
            plant.kill()
        assert answer.result() == DIED
