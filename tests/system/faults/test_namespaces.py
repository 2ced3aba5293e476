"""phosd is killed while it restores a program into a pid namespace of its own, or a clone."""

from contextlib import suppress
from pathlib import Path

import pytest

from phosd.engine.faults import Kind, Point
from phosd.engine.image.private_files import unused
from phosd.engine.program.namespace_maker import end
from phosd.engine.system import pid_namespaces
from tests.node.checkpoint_restore.conftest import Starter
from tests.node.checkpoint_restore.cycle import Undisturbed, computes_right
from tests.support.harness import parse, wait_until
from tests.support.pids import occupy, release
from tests.system.faults.case import REHEARSE, RESTORE, played
from tests.system.faults.daemon_under_fault import DIED, Plant


@pytest.mark.parametrize("kind", [Kind.KILL, Kind.RAISE])
def test_nothing_half_restored_stays(
    plant: Plant, start: Starter, undisturbed: Undisturbed, kind: Kind
) -> None:
    """The namespace is gone, with all that is in it, or the program runs."""
    target = start("single")
    target.wait_for_steps(3)
    plant.start()
    assert plant.end_of(plant.checkpoint(target.pid, "stop")) == "done"
    (image,) = plant.images()
    target.kill()
    holder = occupy(target.pid)  # which the others cannot have for all that

    def restore() -> str:
        options = (1, "pid_namespace", "b", "true")
        return plant.end_of(plant.begin("Restore", "sa{sv}", image, *options))

    def there() -> list[pid_namespaces.PidNamespace]:
        return [*pid_namespaces.living(plant.place / "run")]

    try:
        for point in played(RESTORE, kind, 2):
            plant.stop()
            plant.start(f"{point}:1:{kind}")
            assert restore() in (DIED, "failed"), point
            plant.stop()
            plant.start()
            if found := there():
                assert plant.last()["message"].count("runs"), point
                computes_right(target, undisturbed)
            for each in found:
                end(each)
            assert not list((plant.place / "run" / "hook").glob("pidns/*/*.sock")) or found, point
        assert restore() == "done", plant.last()
        assert len(there()) == 1
        computes_right(target, undisturbed)
    finally:
        release(holder)
        for each in there():
            end(each)


def test_nothing_of_a_clone_stays_and_the_original_goes_on(
    plant: Plant, start: Starter, undisturbed: Undisturbed
) -> None:
    """But its log, which phosd has no time to remove."""
    target = start("single")
    target.wait_for_steps(3)
    plant.start()
    assert plant.end_of(plant.checkpoint(target.pid, "stop")) == "done"
    (image,) = plant.images()
    folder = plant.place / "state" / "images" / image
    whole = {path.name for path in folder.iterdir()}
    logs: list[Path] = []

    def clone() -> str:
        logs.append(target.log.with_name(f"{target.log.name}.clone-{len(logs)}"))
        options = (1, "clone", "s", str(len(logs) - 1))
        return plant.end_of(plant.begin("Restore", "sa{sv}", image, *options))

    def there() -> list[pid_namespaces.PidNamespace]:
        return [*pid_namespaces.living(plant.place / "run")]

    try:
        for point in played(RESTORE, Kind.KILL, 3):
            plant.stop()
            plant.start(f"{point}:1:kill")
            assert clone() in (DIED, "failed"), point
            plant.stop()
            plant.start()
            assert {path.name for path in folder.iterdir()} == whole, point
            for each in there():
                assert plant.last()["message"].count("runs"), point
                end(each)
        assert clone() == clone() == "done", plant.last()
        assert len(there()) == 2
        steps = len(parse(logs[-1].read_bytes())) + 2
        for log in logs[-2:]:
            wait_until(lambda: len(parse(log.read_bytes())) >= steps, "a clone")  # noqa: B023
            values = parse(log.read_bytes())
            assert values == {n: undisturbed("single", len(values))[n] for n in range(len(values))}
        computes_right(target, undisturbed)
    finally:
        for each in there():
            end(each)


def test_nothing_of_a_rehearsal_stays(
    plant: Plant, start: Starter, undisturbed: Undisturbed
) -> None:
    """phosd is killed before each step of it, and while CRIU works; a mover while it loads."""
    target = start("single")
    target.wait_for_steps(3)
    plant.start()
    assert plant.end_of(plant.checkpoint(target.pid, "stop")) == "done"
    (image,) = plant.images()
    folder = plant.place / "state" / "images" / image
    whole = {path.name for path in folder.iterdir()}

    def begin() -> str:
        return plant.begin("VerifyImage", "sa{sv}", image, 1, "rehearse", "b", "true")

    def require_nothing_left() -> None:
        assert not [*pid_namespaces.living(plant.place / "run")]
        assert {path.name for path in folder.iterdir()} == whole
        for scratch in Path("/dev/shm").glob("phosd-*/files"):
            with suppress(FileNotFoundError):  # another test's, whose rehearsal ends just now
                assert not unused(scratch.parent), "nobody has it any more"

    plant.stop()
    plant.start(",".join(f"{point}:1:raise" for point in REHEARSE))
    for _ in REHEARSE:  # each passes the point at which the one before has failed
        assert plant.end_of(begin()) == "failed"
        require_nothing_left()
    plant.stop()
    plant.start(f"{Point.MOVER_COPY_IN}:1:kill")
    assert plant.end_of(begin()) == "failed", "the mover was killed"
    require_nothing_left()
    for point in REHEARSE:
        plant.stop()
        plant.start(f"{point}:1:kill")
        assert plant.end_of(begin()) == DIED, point
        plant.start()
        require_nothing_left()
    for _ in range(2):
        job = begin()
        wait_until(lambda: plant.phase_of(job) in ("cpu", ""), "CRIU to begin")  # noqa: B023
        plant.kill()
        plant.start()
        require_nothing_left()
    assert plant.end_of(begin()) == "done", plant.last()
    require_nothing_left()
    computes_right(target, undisturbed)
