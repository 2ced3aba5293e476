"""kill -9 of phosd while it saves a program's files, and while it puts them back."""

import random
import time

import pytest

from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.support.harness import SELDOM, Target, alive, wait_until
from tests.support.rotation import seeds, times
from tests.system.faults.case import SAVED_FILES
from tests.system.faults.daemon_under_fault import DIED, Plant, leftovers, partial


@pytest.fixture
def target(start: Starter) -> Target:
    made = start("stateful", extra=SELDOM)
    made.wait_for_steps(3)
    return made


@pytest.mark.rotated(of=3)
@pytest.mark.parametrize("point", SAVED_FILES)
def test_while_they_are_saved(
    point: str, plant: Plant, target: Target, undisturbed: Undisturbed
) -> None:
    plant.start(f"{point}:kill")
    assert plant.end_of(plant.checkpoint(target.pid, "stop")) == DIED
    plant.start()
    computes_right(target, undisturbed)
    assert plant.last()["state"] == "interrupted"
    assert not partial(plant.place) and not leftovers(plant.place)
    assert plant.end_of(plant.checkpoint(target.pid, "stop")) == "done"


@pytest.mark.parametrize("point", ["files-fill", "files-filled"])
def test_while_they_are_put_back(
    point: str, plant: Plant, target: Target, undisturbed: Undisturbed
) -> None:
    """The next phosd makes them whole, and nobody has to see to it."""
    plant.start()
    assert plant.end_of(plant.checkpoint(target.pid, "stop")) == "done"
    (image,) = plant.images()
    target.more_steps(3)
    target.kill()
    noted = target.log.parent / "noted"
    newer = noted.read_bytes()
    plant.stop()
    plant.start(f"{point}:hang")
    plant.begin("Restore", "sa{sv}", image, 0)
    wait_until(lambda: [*noted.parent.glob("noted.phos-undo-*")], "it to be written")
    if point == "files-filled":
        wait_until(lambda: noted.read_bytes() != newer, "its bytes to go")
    plant.kill()
    plant.start()
    assert noted.read_bytes() == newer
    assert not [*noted.parent.glob("noted.phos-*")] and not leftovers(plant.place)
    assert (plant.last()["state"], plant.last()["operation"]) == ("interrupted", "restore")
    assert plant.end_of(plant.begin("Restore", "sa{sv}", image, 0)) == "done", plant.last()
    computes_right(target, undisturbed)
    (kept,) = noted.parent.glob("noted.phos-newer-*")
    assert kept.read_bytes() == newer


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", seeds("files and kills", 1, whole=1))
def test_at_random_instants(
    seed: int, plant: Plant, target: Target, undisturbed: Undisturbed
) -> None:
    """The file is whole after such a restore, as it was saved or as it was before, and what is
    newer is not lost.
    """
    chance = random.Random(seed)
    noted = target.log.parent / "noted"
    plant.start()
    for number in range(times(1, everything=5, soak=100)):
        assert plant.end_of(plant.checkpoint(target.pid, "stop")) == "done", plant.last()
        image = plant.images()[-1]
        folder = plant.place / "state" / "images" / image
        saved = {path.read_bytes() for path in folder.rglob("written/*")}
        target.more_steps(3)
        target.kill()
        newer = noted.read_bytes()
        plant.begin("Restore", "sa{sv}", image, 0)
        time.sleep(chance.uniform(0.0, 0.6))
        plant.kill()
        there = noted.read_bytes()
        plant.start()
        if not alive(target.pid):
            assert noted.read_bytes() in {newer, *saved}, (number, seed, there)
            again = plant.end_of(plant.begin("Restore", "sa{sv}", image, 0))
            assert again == "done", (number, seed, plant.last())
        computes_right(target, undisturbed)
        kept = {path.read_bytes() for path in noted.parent.glob("noted.phos-newer-*")}
        assert newer in kept, (number, seed)
        assert not [*noted.parent.glob("noted.phos-undo-*")] and not leftovers(plant.place)
        plant.call("DeleteImage", "sa{sv}", image, 0)
