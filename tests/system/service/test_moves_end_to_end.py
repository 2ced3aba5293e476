"""The real daemon and engine, on two software GPUs: programs move, rest and take turns."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from phosd.engine.node.suspended import Register
from tests.node.checkpoint_restore.conftest import place, undisturbed
from tests.node.checkpoint_restore.cycle import Undisturbed, all_compute_right, computes_right
from tests.support.harness import Target, children, start, wait_until
from tests.system.service.test_end_to_end import phos, phosd

__all__ = ["place", "undisturbed"]

Begin = Callable[[str], Target]


@pytest.fixture
def begin(place: Path) -> Iterator[Begin]:
    """Starts programs, which are gone afterwards."""
    with ExitStack() as stack:

        def begun(program: str) -> Target:
            target = start(program, place, runtime=place / "run")
            stack.callback(target.kill)
            target.wait_for_steps(3)
            return target

        yield begun


def now(bus: str, folder: Path, target: Target) -> tuple[object, list[int]]:
    """The state of a program and the numbers of its GPUs."""
    (row,) = [row for row in phos(bus, folder, "ps") if row["pid"] == target.pid]
    gpus = row["gpus"]
    assert isinstance(gpus, list)
    return row["state"], [gpu["ordinal"] for gpu in gpus]


def wait_to_be_on(bus: str, folder: Path, target: Target, *gpus: int) -> None:
    """A phosd that has just been started may not know the GPUs yet."""
    there = ("running", list(gpus))
    wait_until(lambda: now(bus, folder, target) == there, f"{target.program} on {gpus}")


def test_moved_suspended_and_swapped_over_the_bus(
    bus: str, place: Path, begin: Begin, undisturbed: Undisturbed
) -> None:
    first, second = begin("single"), begin("features")
    one, two = str(first.pid), str(second.pid)
    with phosd(bus, place):
        wait_to_be_on(bus, place, first, 0)
        done = phos(bus, place, "migrate", one, "--to", "1")[-1]
        assert (done["state"], done["result"], done["destination"]) == ("done", "0:1", "1")
        assert now(bus, place, first) == ("running", [1])
        first.more_steps(2)

        done = phos(bus, place, "suspend", two)[-1]
        assert (done["state"], done["result"]) == ("done", "memory")
        assert now(bus, place, second) == ("suspended", [])
        stood = second.position()
        phos(bus, place, "swap", one, two)
        assert now(bus, place, first) == ("suspended", [])
        assert now(bus, place, second) == ("running", [1])
        second.wait_for_steps(2, since=stood)
        done = phos(bus, place, "resume", one, "--gpu", "0")[-1]
        assert (done["state"], done["result"]) == ("done", "1:0")
        assert now(bus, place, first) == ("running", [0])
        first.more_steps(2)

        rows = phos(bus, place, "history", "--pid", one)
        assert [row["operation"] for row in rows] == ["resume", "swap", "migrate"]
        names = [phase["name"] for phase in _phases(rows[-1])]
        assert names.index("prepare") < names.index("quiesce") < names.index("unpark")
        assert [row["operation"] for row in phos(bus, place, "history", "--operation", "suspend")]
    all_compute_right(undisturbed, first, second)


def _phases(row: dict[str, object]) -> list[dict[str, object]]:
    phases = row["phases"]
    assert isinstance(phases, list)
    return phases


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_suspended_program_outlives_phosd(
    bus: str, place: Path, begin: Begin, undisturbed: Undisturbed, where: str
) -> None:
    target = begin("single")
    with phosd(bus, place):
        done = phos(bus, place, "suspend", str(target.pid), "--where", where)[-1]
        assert (done["state"], done["result"]) == ("done", where)
        stood = target.values()
    with phosd(bus, place):
        assert now(bus, place, target) == ("suspended", [])
        assert target.values() == stood
        phos(bus, place, "resume", str(target.pid), "--gpu", "1")
        assert now(bus, place, target) == ("running", [1])
        target.wait_for_steps(len(stood) + 2)
    computes_right(target, undisturbed)


def test_what_a_suspended_program_had_goes_with_it(bus: str, place: Path, begin: Begin) -> None:
    """It may be most of the host's memory, and phosd may not be started anew for long."""
    target = begin("single")
    with phosd(bus, place):
        phos(bus, place, "suspend", str(target.pid), "--where", "disk")
        shelf = place / "state" / "suspended"
        assert list(shelf.glob("*/images/*")) and Register(place / "run").all()
        target.kill()
        wait_until(lambda: not Register(place / "run").all(), "it to be forgotten")
        wait_until(lambda: not list(shelf.glob("*/images/*")), "its memory to be removed")


def test_a_gpu_is_evacuated(bus: str, place: Path, begin: Begin, undisturbed: Undisturbed) -> None:
    targets = [begin("single"), begin("features"), begin("two_devices")]
    pids = {target.pid for target in targets}
    with phosd(bus, place):
        for target, gpus in zip(targets, ((0,), (0,), (0, 1)), strict=True):
            wait_to_be_on(bus, place, target, *gpus)
        plan = phos(bus, place, "evacuate", "0", "--dry-run")
        (both,) = [row for row in plan if row["pid"] == targets[2].pid]
        # Two GPUs of a program do not become one.
        assert (both["action"], both["device_bytes"]) == ("suspend", 6 << 20)
        others = [row for row in plan if row["pid"] != targets[2].pid]
        assert {(row["pid"], row["action"], row["destination"]) for row in others} == {
            (target.pid, "migrate", "0:1") for target in targets[:2]
        }
        assert {row["pid"] for row in plan} == pids
        for target in targets:
            target.more_steps(1)  # a plan changes nothing
        done = phos(bus, place, "evacuate", "0", "--yes")
        assert done[-1] == {"gpu": "0", "left": [], "others": []}
        assert [now(bus, place, target) for target in targets] == [
            ("running", [1]),
            ("running", [1]),
            ("suspended", []),
        ]
        assert phos(bus, place, "evacuate", "0", "--dry-run") == []
        phos(bus, place, "resume", str(targets[2].pid))
        assert now(bus, place, targets[2]) == ("running", [0, 1])
        for target in targets:
            target.more_steps(1)
    all_compute_right(undisturbed, *targets)


def test_processes_that_share_memory_leave_and_come_back_together(
    bus: str, place: Path, begin: Begin, undisturbed: Undisturbed
) -> None:
    target = begin("shared_pair")
    (child,) = children(target.pid)

    def states() -> list[object]:
        rows = {row["pid"]: row for row in phos(bus, place, "ps")}
        return [(rows[pid]["state"], rows[pid]["gpus"]) for pid in (target.pid, child)]

    with phosd(bus, place):
        wait_to_be_on(bus, place, target, 0)
        done = phos(bus, place, "evacuate", "0", "--yes")
        assert done[-1] == {"gpu": "0", "left": [], "others": []}
        migrations = phos(bus, place, "history", "--operation", "migrate", "--state", "done")
        assert [row["target"] for row in migrations] == [str(target.pid)]
        phos(bus, place, "suspend", str(target.pid))
        assert states() == [("suspended", []), ("suspended", [])]
        assert phos(bus, place, "resume", str(child))[-1]["result"] == "1:1"
        assert now(bus, place, target) == ("running", [1])
    computes_right(target, undisturbed)


def test_bad_destinations_leave_the_program_alone(
    bus: str, place: Path, begin: Begin, undisturbed: Undisturbed
) -> None:
    target = begin("single")
    pid = str(target.pid)
    with phosd(bus, place):
        for words, code, text in (
            (("migrate", pid, "--to", "7"), "InvalidOption", "names no GPU"),
            (("migrate", pid, "--to", "0"), "InvalidOption", "is on GPU 0 already"),
            (("migrate", pid, "--to", "1:0"), "InvalidOption", "does not use GPU 1"),
            (("resume", pid), "NoSuchProcess", "is not suspended"),
            (("swap", pid, str(2**22)), "NoSuchProcess", "there is no process"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "phosd.cli.main", "--json", "--bus", bus, *words],
                capture_output=True,
                text=True,
                timeout=120,
            )
            error = json.loads(done.stdout.splitlines()[-1])
            assert (error["error"], text in error["message"]) == (code, True), error
        phos(bus, place, "suspend", pid)
        done = subprocess.run(
            [sys.executable, "-m", "phosd.cli.main", "--json", "--bus", bus, "suspend", pid],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert "suspended" in json.loads(done.stdout.splitlines()[-1])["message"]
        phos(bus, place, "resume", pid)
    computes_right(target, undisturbed)
