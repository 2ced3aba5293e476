"""What the real daemon tells of real programs, with a hook and without."""

from pathlib import Path

import pytest

from phosd.engine.system import procfs
from tests.support.bus import busctl
from tests.support.harness import Target, start, wait_until
from tests.support.service import MANAGER, ROOT
from tests.system.service.test_end_to_end import NAME, copy_by_chunks, phosd
from tests.system.service.test_object_methods import LOOKS, ask


def path_of(target: Target) -> str:
    found = procfs.process_id(target.pid)
    assert found is not None
    return "/org/phos/process/_{}_{}".format(*found)


def get(bus: str, path: str, interface: str, name: str) -> str:
    line = busctl(bus, "get-property", NAME, path, f"org.phos.{interface}", name)
    return line.split(maxsplit=1)[1].strip()


def listed(bus: str, path: str) -> bool:
    return path in busctl(bus, "call", NAME, ROOT, MANAGER, "ListProcesses")


def test_a_hooked_program_before_during_and_after_a_checkpoint(bus: str, tmp_path: Path) -> None:
    """While a job works on it nothing connects to it: CRIU could not save that socket."""
    # So slow that most of the copying comes after CRIU, even where that takes seconds.
    copy_by_chunks(tmp_path)
    with phosd(bus, tmp_path, PHOS_SOFTGPU_COPY_RATE="2M"):
        target = start("single", tmp_path, runtime=tmp_path / "run")
        try:
            target.wait_for_steps(2)
            path = path_of(target)
            wait_until(lambda: listed(bus, path), "the program")

            rows = ask(bus, path, "Process1", "ListBlocks")
            assert sum(row[2] for row in rows) == int(get(bus, path, "Process1", "DeviceBytes")) > 0
            assert {row[3] for row in rows} == {0}
            assert [row[0] for row in rows] == sorted(row[0] for row in rows)
            assert ask(bus, path, "Process1", "ReadLog").startswith("state 0\n")
            assert ask(bus, path, "Process1", "ListKernels") == []

            words = ("Checkpoint", "ua{sv}", str(target.pid), "1", "mode", "s", "concurrent")
            job = busctl(bus, "call", NAME, ROOT, MANAGER, *words).split('"')[1]
            wait_until(lambda: get(bus, job, "Job1", "Phase") == '"drain"', "the drain")
            for member in LOOKS:
                with pytest.raises(RuntimeError, match=f"a job works on process {target.pid}"):
                    ask(bus, path, "Process1", member)
            assert get(bus, job, "Job1", "State") == '"running"'
            wait_until(lambda: get(bus, job, "Job1", "State") == '"done"', "its end")

            kernels = ask(bus, path, "Process1", "ListKernels")
            assert kernels and all(name and launches > 0 for name, _, launches, _ in kernels)
            assert ask(bus, path, "Process1", "ListBlocks") == rows
            target.more_steps(2)
        finally:
            target.kill()


def test_a_program_without_a_hook_has_nothing_to_tell(bus: str, tmp_path: Path) -> None:
    with phosd(bus, tmp_path):
        target = start("single", tmp_path, hooked=False)
        try:
            target.wait_for_steps(1)
            path = path_of(target)
            wait_until(lambda: listed(bus, path), "the program")
            for member in LOOKS:
                with pytest.raises(RuntimeError, match=f"{target.pid} has no hook") as caught:
                    ask(bus, path, "Process1", member)
                assert "phos run" in str(caught.value)
        finally:
            target.kill()
