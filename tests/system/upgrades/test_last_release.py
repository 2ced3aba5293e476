"""What the last release has left is as good as before: images, and programs that sleep or run."""

from pathlib import Path

from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import (
    AFTER,
    Undisturbed,
    all_compute_right,
    check,
    computes_right,
)
from tests.support.harness import Target, alive
from tests.system.faults.daemon_under_fault import DIED, Plant


def hooked_by(release: Path, start: Starter, program: str = "single") -> Target:
    """A program that was started before the upgrade."""
    hook = release / "phosd/native/libphos_hook.so"
    target = start(program, extra={"LD_PRELOAD": str(hook)})
    target.wait_for_steps(3)
    return target


def restored(plant: Plant, target: Target, image: str, undisturbed: Undisturbed) -> None:
    """The program goes on from its image after a kill."""
    target.more_steps(AFTER)
    target.kill()
    original, mark = target.values(), target.position()
    assert plant.end_of(plant.begin("Restore", "sa{sv}", image, 0)) == "done", plant.last()
    check(target.wait_for_steps(AFTER, since=mark), original, undisturbed(target.program))


def test_images_and_programs_of_the_last_release_are_restored_and_resumed(
    plant: Plant, release: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    saved, asleep, running = (hooked_by(release, start) for _ in range(3))
    plant.start(package=release)
    assert plant.end_of(plant.checkpoint(saved.pid, "concurrent")) == "done", plant.last()
    assert plant.end_of(plant.begin("Suspend", "ua{sv}", asleep.pid, 0)) == "done", plant.last()
    plant.stop()
    assert str(release) in Path(f"/proc/{running.pid}/maps").read_text()
    plant.start()
    (old,) = plant.images()
    assert plant.verify(old) == "done"
    # As on a machine on which no earlier phosd has run: the image's hook listens nowhere else.
    (plant.place / "run/hook").chmod(0o755)
    restored(plant, saved, old, undisturbed)
    assert plant.end_of(plant.begin("Resume", "ua{sv}", asleep.pid, 0)) == "done", plant.last()
    assert plant.end_of(plant.checkpoint(running.pid, "concurrent")) == "done", plant.last()
    restored(plant, running, plant.images()[-1], undisturbed)
    all_compute_right(undisturbed, saved, asleep, running)
    plant.stop()


def test_what_a_mover_of_the_last_release_keeps_is_brought_back(
    plant: Plant, release: Path, start: Starter, undisturbed: Undisturbed
) -> None:
    """Its phosd was killed while the memory of a program was parked. It makes room for another
    mover then.
    """
    target = hooked_by(release, start)
    plant.start("checkpoint-control:1:kill", package=release)
    assert plant.end_of(plant.checkpoint(target.pid, "stop")) == DIED
    plant.start()
    assert plant.last()["state"] == "interrupted"
    computes_right(target, undisturbed)
    assert plant.end_of(plant.checkpoint(target.pid, "stop")) == "done", plant.last()
    restored(plant, target, plant.images()[-1], undisturbed)
    assert alive(target.pid)
    plant.stop()
