"""Check the reaper, under which `make test` runs the tests: it must pass on how they ended."""

import os
import signal
import subprocess
import sys

import pytest

from phosd.engine.system import procfs
from tests.support import reaper
from tests.support.harness import running, wait_until

COMMAND = (sys.executable, reaper.__file__)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_it_exits_as_the_command_does(script: str, code: int) -> None:
    done = subprocess.run([*COMMAND, "sh", "-c", script], check=False)
    assert done.returncode == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_ends_before_it(number: signal.Signals) -> None:
    script = "trap 'echo told; exit 5' TERM; trap '' INT; echo ready; sleep 0.5 & wait; exit 6"
    with running([*COMMAND, "sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        said = process.stdout.read()
    assert (said, process.returncode) == (("told\n", 5) if number == signal.SIGTERM else ("", 6))


def test_it_waits_for_a_process_that_has_lost_its_parent() -> None:
    script = "sh -c 'sleep 60 >&- & echo $!'; exec sleep 60"
    with running([*COMMAND, "sh", "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        orphan = int(process.stdout.readline())
        wait_until(lambda: parent(orphan) == process.pid, "the orphan to change hands")
        os.kill(orphan, signal.SIGKILL)
        wait_until(lambda: parent(orphan) is None, "the orphan's pid to be free")
        process.terminate()


def parent(pid: int) -> int | None:
    """Return the parent of a process, or None when its pid is free."""
    stat = procfs.stat(pid)
    return None if stat is None else stat.parent
