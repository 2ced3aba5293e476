"""A phosd that the bus starts when it is called; or that it cannot start."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.bus import busctl
from tests.system.cli.test_client import PHOS, lines

_BUS = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>session</type>
  <listen>unix:path={folder}/bus</listen>
  <auth>EXTERNAL</auth>
  <servicedir>{folder}</servicedir>
  <policy context="default">
    <allow send_destination="*"/>
    <allow receive_sender="*"/>
    <allow own="*"/>
  </policy>
</busconfig>
"""
_PHOSD = """
import os, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
from phosd.service.config import Config
from tests.support.fake_engine import FakeEngine
from tests.support.service import serving
folder = pathlib.Path(sys.argv[1])
(folder / "pid").write_text(str(os.getpid()))
config = Config(state_dir=folder / "state", runtime_dir=folder / "run")
config.runtime_dir.mkdir(exist_ok=True)
engine = FakeEngine()
engine.go.set()
with serving(f"unix:path={folder}/bus", config, engine):
    signal.sigwait([signal.SIGTERM])
"""


@contextmanager
def activating(folder: Path, command: str) -> Iterator[str]:
    """A bus that starts phosd by this command; its address."""
    (folder / "bus.conf").write_text(_BUS.format(folder=folder))
    (folder / "org.phos.service").write_text(f"[D-BUS Service]\nName=org.phos\nExec={command}\n")
    daemon = subprocess.Popen(
        ["dbus-daemon", f"--config-file={folder / 'bus.conf'}", "--nofork", "--print-address"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    try:
        assert daemon.stdout is not None and daemon.stdout.readline()
        yield f"unix:path={folder}/bus"
    finally:
        if (folder / "pid").exists():
            os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
        daemon.terminate()
        daemon.communicate()


@pytest.fixture
def sleeping(tmp_path: Path) -> Iterator[str]:
    """A bus with a phosd that does not run yet."""
    script = tmp_path / "activated.py"
    script.write_text(_PHOSD)
    with activating(tmp_path, f"{sys.executable} {script} {tmp_path}") as address:
        yield address


def phos(address: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PHOS, "--bus", address, *words], capture_output=True, text=True, timeout=120
    )


def test_a_job_that_starts_phosd_is_watched_to_its_end(sleeping: str) -> None:
    done = phos(sleeping, "checkpoint", str(os.getpid()))
    assert (done.returncode, done.stdout) == (0, "image-0\n"), done.stderr


def test_the_doctor_does_not_start_phosd(sleeping: str) -> None:
    """Somebody may have stopped it on purpose."""
    found = {row["subject"]: row for row in lines(phos(sleeping, "doctor", "--json").stdout)}
    assert found["daemon"]["level"] == "warning"
    assert "phosd does not run on this bus" in str(found["daemon"]["text"])
    assert "org.phos\n" not in busctl(sleeping, "list", "--acquired")
    assert phos(sleeping, "ps").returncode == 0
    found = {row["subject"]: row for row in lines(phos(sleeping, "doctor", "--json").stdout)}
    assert found["daemon"]["level"] == "ok"


def test_a_phosd_that_does_not_start_is_told(tmp_path: Path) -> None:
    with activating(tmp_path, "/bin/false") as address:
        done = phos(address, "ps")
    assert done.returncode == 1
    assert "phosd did not start when it was called: " in done.stderr
    assert "`journalctl -u phosd` tells why" in done.stderr
