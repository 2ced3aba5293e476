"""``make demo`` as a newcomer sees it: it works, it says so in its last line, it leaves nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.harness import wait_until


def start(folder: Path, **extra: str) -> subprocess.Popen[str]:
    """The demo, with its temporary folders in ``folder``."""
    return subprocess.Popen(
        [sys.executable, "-m", "phosd.demo"],
        env=os.environ | {"TMPDIR": str(folder), "NO_COLOR": "1", **extra},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_of(folder: Path) -> list[str]:
    """Command lines of the processes that the demo in ``folder`` started."""
    mark = f"TMPDIR={folder}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_text())
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # ended meanwhile, or not ours
    return found


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name, for sockets."""
    return tmp_path_factory.mktemp("d")


@pytest.mark.always
def test_demo(short: Path) -> None:
    demo = start(short)
    output, errors = demo.communicate(timeout=120)
    result = json.loads(output.splitlines()[-1])
    assert demo.returncode == 0, output + errors
    assert result["demo"] == "ok"
    assert result["values_equal"] is True
    assert result["values_compared"] >= 20
    assert 0 < result["stop_s"] < 60
    assert result["image_bytes"] > 1 << 20
    assert result["device"] == "PHOS software GPU"
    assert "\x1b[" not in output, "colours though NO_COLOR is set"
    wait_until(lambda: not processes_of(short), "the end of what the demo started", 10)
    assert list(short.iterdir()) == []


def test_interrupted_demo_cleans_up(short: Path) -> None:
    demo = start(short)
    assert demo.stdout is not None
    for line in demo.stdout:
        if "loss" in line:
            break
    assert any("phosd.demo.train" in command for command in processes_of(short))
    os.kill(demo.pid, signal.SIGINT)
    output, errors = demo.communicate(timeout=60)
    assert demo.returncode == 1, errors
    assert json.loads(output.splitlines()[-1]) == {"demo": "failed", "reason": "interrupted"}
    wait_until(lambda: not processes_of(short), "the end of what the demo started", 10)
    assert list(short.iterdir()) == []


def test_failing_demo_says_why(short: Path) -> None:
    demo = start(short, PATH=str(short))
    output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 1
    result = json.loads(output.splitlines()[-1])
    assert result["demo"] == "failed"
    assert "dbus-daemon" in result["reason"]
    assert processes_of(short) == []
