"""A transfer of an image fails at any of its steps: nothing is kept, and the next one succeeds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phosd.engine.faults import Kind, Point
from tests.node.checkpoint_restore.conftest import Starter
from tests.support.harness import SELDOM, running
from tests.system.faults.case import ENDING, FAILING, TRANSFER
from tests.system.faults.daemon_under_fault import Plant, partial, wait_for_fault


@pytest.mark.rotated(of=15)
@pytest.mark.parametrize("kind", [*FAILING, *ENDING], ids=str)
@pytest.mark.parametrize("fault", TRANSFER)
def test_nothing_is_kept_of_half_a_transfer(
    fault: Point, kind: Kind, plant: Plant, start: Starter
) -> None:
    target = start("single", extra=SELDOM)
    target.wait_for_steps(3)
    plant.start()
    assert plant.end_of(plant.checkpoint(target.pid, "stop")) == "done"
    (image,) = plant.images()
    target.kill()
    file = plant.place / "image.phos"
    words: tuple[str, ...] = ("export", image, str(file))
    if fault.startswith("import-"):
        phos(plant, *words)
        words = ("import", str(file), "--trust", "--anyway", "--again")
    plant.stop()
    before = plant.said()
    plant.start(f"{fault}:1:{kind}")
    with running(command(plant, *words), stdout=subprocess.PIPE) as asking:
        wait_for_fault(plant, before, fault)
        if kind is Kind.HANG:
            plant.kill()
        said, _ = asking.communicate(timeout=60)
    if kind is Kind.SHORT and fault is Point.IMPORT_PUBLISH:  # it moves no bytes
        assert asking.returncode == 0, said
        return
    error = json.loads(said.splitlines()[-1])
    assert asking.returncode != 0 and error["error"] and error["message"], said
    plant.stop()
    plant.start()
    assert plant.last()["state"] in ("failed", "interrupted", "cancelled"), plant.last()
    assert not partial(plant.place) and plant.images() == [image]
    assert file.exists() == fault.startswith("import-")
    assert [path.name for path in plant.place.glob("*.partial")] == []
    phos(plant, *words)
    assert {plant.verify(each) for each in plant.images()} == {"done"}
    plant.stop()


def command(plant: Plant, *words: str) -> list[str | Path]:
    return [sys.executable, "-m", "phosd.cli.main", "--json", "--bus", plant.bus, *words]


def phos(plant: Plant, *words: str) -> None:
    """Run a command, which must succeed."""
    done = subprocess.run(
        command(plant, *words), capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
