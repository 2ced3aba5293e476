"""A GPU program in a container of runc's is saved and restored by runc's own commands."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.engine.system.native import runtime_plugins
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.node.containers.conftest import place, reached_gpus, undisturbed
from tests.support import containers
from tests.support.containers import Contained, Runc
from tests.support.harness import parse, wait_until
from tests.support.service import bus
from tests.system.service.test_end_to_end import phos, phosd

__all__ = ["bus", "place", "reached_gpus", "undisturbed"]

LIBDIR = f"libdir {runtime_plugins()}\n"


@contextmanager
def running(place: Path) -> Iterator[tuple[Contained, Runc]]:
    with containers.run_by_runc("single", place, criu=LIBDIR) as target:
        assert target.runc is not None
        target.wait_for_steps(3)
        yield target, target.runc


def succeeded(done: "subprocess.CompletedProcess[str]", place: Path) -> None:
    logs = [path.read_text(errors="replace")[-3000:] for path in place.glob("*.log")]
    assert done.returncode == 0, "\n".join([done.stdout, *logs])


def right(target: Contained, undisturbed: Undisturbed) -> None:
    values = target.values()
    expected = undisturbed(target.program, steps=max(values) + 1)
    assert values == {step: expected[step] for step in values}


def test_saved_while_it_runs_on_then_ended_and_restored_twice(
    bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    with phosd(bus, place), running(place) as (target, runc):
        for name in ("one", "two"):
            succeeded(runc.checkpoint(place / name, "--leave-running"), place)
            target.more_steps(2)
        succeeded(runc.checkpoint(place / "last"), place)
        wait_until(lambda: target.process.poll() is not None, "the container to end")
        position = target.position()
        for _ in range(2):
            os.truncate(target.log, position)  # CRIU wants files as they were
            runc.delete()
            succeeded(runc.restore(place / "last"), place)
            target.first = runc.pid
            target.wait_for_steps(2, since=position)
            (found,) = [row for row in phos(bus, place, "ps") if row["pid"] == runc.pid]
            assert (found["state"], found["hook"]) == ("running", "hooked")
            right(target, undisturbed)
            os.kill(runc.pid, 9)
