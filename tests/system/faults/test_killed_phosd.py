"""kill -9 of phosd while a program stands still, and while it is brought to life."""

from pathlib import Path

import pytest

from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import AFTER, Undisturbed, check, computes_right
from tests.support.bus import private_bus
from tests.support.harness import SELDOM, alive, wait_until
from tests.system.faults.daemon_under_fault import DIED, Plant, eventually_alone, leftovers, partial
from tests.system.service.test_end_to_end import phos

PARKED = ("parking-park", "parking-detach", "checkpoint-control", "driver-checkpoint")
FROZEN = ("checkpoint-cpu", "checkpoint-unpark")
RUNNING = ("checkpoint-drain", "checkpoint-persist")
RESTORE = ("restore-cpu", "restore-control", "restore-map", "restore-open")
WITHOUT_PARKING = ("parking-detach", "checkpoint-control", "driver-lock", *FROZEN)


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize(
    ("program", "mode", "points"),
    [
        ("single", "concurrent", (*PARKED, *FROZEN, *RUNNING)),
        ("single", "stop", (*PARKED, *FROZEN, "checkpoint-persist")),
        ("single", "driver", WITHOUT_PARKING),
        ("shared_pair", "concurrent", ("parking-park:2", "checkpoint-control", *FROZEN)),
        ("two_devices", "stop", ("checkpoint-control", "checkpoint-unpark")),
    ],
)
def test_the_program_lives_on(
    program: str,
    mode: str,
    points: tuple[str, ...],
    plant: Plant,
    start: Starter,
    undisturbed: Undisturbed,
) -> None:
    """The next phosd brings it back, tells the job's end, and saves it."""
    target = start(program, extra=SELDOM)
    target.wait_for_steps(3)
    for point in points:
        plant.start(f"{point}{'' if ':' in point else ':1'}:kill")
        assert plant.end_of(plant.checkpoint(target.pid, mode)) == DIED, point
        plant.start()
        computes_right(target, undisturbed)
        job = plant.last()
        assert (job["state"], job["operation"]) == ("interrupted", "checkpoint"), point
        assert "phosd ended while the job ran; " in job["message"]
        assert not partial(plant.place) and not leftovers(plant.place)
        assert plant.end_of(plant.checkpoint(target.pid, mode)) == "done", plant.log.read_text()
        computes_right(target, undisturbed)
        plant.stop()
    plant.start()
    assert {plant.verify(image) for image in plant.images()} == {"done"}
    assert len(plant.images()) == len(points)
    plant.stop()
    eventually_alone(plant)


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize(
    ("program", "mode"),
    [("shared_pair", "concurrent"), ("single", "driver"), ("workers", "stop")],
)
def test_what_was_being_restored_does_not_stay_behind(
    program: str, mode: str, plant: Plant, start: Starter, undisturbed: Undisturbed
) -> None:
    """Its image is whole, its ids are free, and the next restore succeeds. A program that only had
    to be let go of runs.
    """
    target = start(program)
    target.wait_for_steps(3)
    plant.start()
    assert plant.end_of(plant.checkpoint(target.pid, mode)) == "done"
    (image,) = plant.images()
    target.more_steps(AFTER)
    target.kill()
    original = target.values()
    for point in RESTORE:
        plant.stop()
        plant.start(f"{point}:1:kill")
        assert plant.end_of(plant.begin("Restore", "sa{sv}", image, 0)) == DIED, point
        plant.start()
        job = plant.last()
        assert (job["state"], job["operation"]) == ("interrupted", "restore"), point
        assert "restored" in job["message"], job["message"]
        if point == "restore-open" or (mode, point) == ("driver", "restore-map"):
            assert f"the restored program (pid {target.pid}) runs" in job["message"]
            computes_right(target, undisturbed)
            target.kill()
        assert not any(alive(pid) for pid in target.pids), job["message"]
        assert not leftovers(plant.place)
    assert plant.verify(image) == "done"
    mark = target.position()
    assert plant.end_of(plant.begin("Restore", "sa{sv}", image, 0)) == "done", plant.last()
    check(target.wait_for_steps(AFTER, since=mark), original, undisturbed(program))
    plant.stop()


def test_a_program_without_the_hook_sleeps_on(
    plant: Plant, start: Starter, undisturbed: Undisturbed
) -> None:
    """Its threads poll the driver, which has taken away what they read: they are stopped, also when
    no phosd runs, until one has resumed it.
    """
    target = start("polling", hooked=False)
    target.wait_for_steps(3)

    def end(member: str) -> str:
        return plant.end_of(plant.begin(member, "ua{sv}", target.pid, 0))

    def shown() -> object:
        (row,) = [row for row in phos(plant.bus, plant.place, "ps") if row["pid"] == target.pid]
        return row["state"]

    plant.start("driver-checkpoint:1:kill")
    assert end("Suspend") == DIED
    plant.start("group-stop-end:2:kill")  # the first time it is at the end of the suspension
    job = plant.last()
    assert "stopped for a suspension and brought back" in job["message"], job
    computes_right(target, undisturbed)
    assert end("Suspend") == "done" and shown() == "suspended"
    stood = target.values()
    assert end("Resume") == DIED
    plant.start()
    job = plant.last()
    assert "stopped for a suspension and brought back" in job["message"], job
    computes_right(target, undisturbed)
    assert end("Suspend") == "done"
    plant.kill()
    plant.start()
    assert shown() == "suspended" and len(target.values()) > len(stood)
    assert end("Resume") == "done" and shown() == "running"
    computes_right(target, undisturbed)
    plant.stop()


def test_what_criu_had_made_half_does_not_stay_behind(
    plant: Plant, start: Starter, undisturbed: Undisturbed
) -> None:
    """Such processes have their ids and their memory, and answer nobody, the driver neither."""
    target = start("workers")
    target.wait_for_steps(3)
    plant.start()
    assert plant.end_of(plant.checkpoint(target.pid, "stop")) == "done"
    (image,) = plant.images()
    target.kill()
    plant.begin("Restore", "sa{sv}", image, 0)
    wait_until(lambda: alive(target.pid), "CRIU to make the first process")
    plant.kill()
    plant.start()
    message = plant.last()["message"]
    assert "was ended" in message or "nothing had been restored" in message, message
    assert not any(alive(pid) for pid in target.pids)
    assert not leftovers(plant.place)
    assert plant.end_of(plant.begin("Restore", "sa{sv}", image, 0)) == "done", plant.last()
    computes_right(target, undisturbed)
    plant.stop()


def test_a_second_daemon_on_another_bus_is_told_apart(plant: Plant, tmp_path: Path) -> None:
    """It would take the jobs of the first for dead."""
    plant.start()
    (tmp_path / "bus").mkdir()
    with private_bus(tmp_path / "bus") as other:
        second = Plant(other, plant.place)
        with pytest.raises(AssertionError, match="another phosd runs with"):
            second.start()
    assert not plant.dead
    plant.call("ListImages")
    plant.stop()
