"""The records of processes that phosd has stopped: others are never continued."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from phosd.engine.image import private_files
from phosd.engine.program.stopped import StoppedProcess, StoppedProcesses
from phosd.engine.system import procfs
from phosd.errors import Busy
from tests.support.harness import halt


@pytest.fixture
def stopped() -> Iterator[int]:
    """A process that its user has stopped."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as process:
        halt(process.pid)
        yield process.pid
        process.kill()


def write(folder: Path, text: bytes, pid: int) -> Path:
    (folder / "stopped").mkdir(mode=0o700)
    path = folder / "stopped" / f"{pid}.json"
    private_files.write_durably(path, text)
    return path


@pytest.mark.parametrize("what", ["boot", "start"])
def test_one_of_another_boot_or_with_the_pid_of_a_dead_one(
    what: str, stopped: int, tmp_path: Path
) -> None:
    known = procfs.process_id(stopped)
    assert known is not None
    boot = "another" if what == "boot" else procfs.boot_id()
    record = StoppedProcess(stopped, known.start_time + (what == "start"), boot, stopped)
    path = write(tmp_path, msgspec.json.encode(record), stopped)
    register = StoppedProcesses(tmp_path)
    assert not register.of([stopped]) and not register.living() and not register.let_go([stopped])
    with pytest.raises(Busy, match="by a signal"):
        register.require_going(stopped)
    with register.restore_threads_run([stopped]):
        assert not procfs.tracer(stopped)
    found = procfs.stat(stopped)
    assert found is not None and found.state == "T"
    register.forget_the_dead()
    assert not path.exists()


def test_one_that_cannot_be_read_is_told(
    stopped: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, b"{", stopped)
    register = StoppedProcesses(tmp_path)
    assert register.living() == []
    assert str(path) in caplog.text
    register.forget_the_dead()
    assert path.exists()
    os.kill(stopped, signal.SIGCONT)
    register.require_going(stopped)
