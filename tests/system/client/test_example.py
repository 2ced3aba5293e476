"""The client's example does what docs/reference/python.md says, on the software GPU."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import PROGRAMS, alive, parse, wait_until
from tests.support.service import Service
from tests.system.service.test_end_to_end import phos, phosd

EXAMPLE = Path(__file__).parents[3] / "examples/client.py"


def run(bus: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PHOS_BUS": bus},
    )


@pytest.mark.parametrize("pid", [2**22])
def test_what_goes_wrong_is_told(service: Service, pid: int) -> None:
    done = run(service.address, str(pid))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"there is no process {pid}")
    assert done.stderr.endswith("(NoSuchProcess)\n")


def test_a_name_that_no_program_has(service: Service) -> None:
    done = run(service.address, "bert")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("no program is called bert")


def test_a_program_is_saved_ended_and_restored(bus: str, tmp_path: Path) -> None:
    single = [sys.executable, str(PROGRAMS / "single.py"), "0"]

    def begun(*named: str) -> tuple[int, Path]:
        words = ("--gpu", "soft", "--detach", *named, "--", *single)
        (started,) = phos(bus, tmp_path, "run", *words)
        return int(str(started["pid"])), Path(str(started["stdout"]))

    with phosd(bus, tmp_path):
        pid, output = begun("--name", "bert")
        undisturbed, expected = begun()
        try:
            wait_until(lambda: len(parse(output.read_bytes())) > 3, "the program to compute")
            done = run(bus, "bert")
            assert done.returncode == 0, done.stdout + done.stderr
            saved, pid = pid, int(done.stdout.splitlines()[-1].split()[1])
            assert done.stdout.endswith(f"process {pid} goes on from there\n")
            assert alive(pid)
            position = output.stat().st_size
            wait_until(lambda: len(parse(output.read_bytes()[position:])) > 5, "it to compute on")
            listed = run(bus).stdout
            assert f"{pid:>8}  hooked" in listed and f"of process {saved}, " in listed
            computed = output.read_bytes()
            steps = parse(computed)
            wait_until(lambda: parse(expected.read_bytes()).keys() >= steps.keys(), "as many steps")
        finally:
            for each in (pid, undisturbed):
                os.kill(each, signal.SIGKILL)
    right = parse(expected.read_bytes())
    assert steps == {step: right[step] for step in steps}
    assert computed.count(b"\n") == len(steps), "nothing is done twice"
