"""kill -9 of phosd while a program stands still, and while it is brought to life."""

import pytest

from tests.core.conftest import Starter
from tests.core.cycle import Undisturbed
from tests.faults.plant import (
    DIED,
    Plant,
    computes_right,
    eventually_alone,
    leftovers,
    partial,
)

PARKED = ("hook-park", "hook-detach", "checkpoint-control", "driver-checkpoint")
FROZEN = ("checkpoint-cpu", "checkpoint-unpark")
RUNNING = ("checkpoint-drain", "checkpoint-persist")
RESTORE = ("restore-load", "restore-cpu", "restore-control", "restore-map", "restore-verify")
WITHOUT_PARKING = ("hook-detach", "checkpoint-control", "driver-lock", *FROZEN)


@pytest.mark.parametrize(
    ("program", "mode", "points"),
    [
        ("single", "concurrent", (*PARKED, *FROZEN, *RUNNING)),
        ("single", "stop", (*PARKED, *FROZEN, "checkpoint-persist")),
        ("single", "driver", WITHOUT_PARKING),
        ("shared_pair", "concurrent", ("hook-park:2", "checkpoint-control", *FROZEN)),
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
    target = start(program)
    target.wait_for_steps(3)
    for point in points:
        plant.start(f"{point}{'' if ':' in point else ':1'}:kill")
        assert plant.end_of(plant.checkpoint(target.pid, mode)) == DIED, point
        plant.start()
        computes_right(target, undisturbed)
        job = plant.history()[0]
        assert (job["state"], job["operation"]) == ("interrupted", "checkpoint"), point
        assert "phosd ended while the job ran; process" in job["message"] or "processes run" in str(
            job["message"]
        )
        assert not partial(plant.place) and not leftovers(plant.place)
        assert plant.end_of(plant.checkpoint(target.pid, mode)) == "done", plant.log.read_text()
        computes_right(target, undisturbed)
        plant.stop()
    plant.start()
    assert {plant.verify(image) for image in plant.images()} == {"done"}
    assert len(plant.images()) == len(points)
    plant.stop()
    eventually_alone(plant)
