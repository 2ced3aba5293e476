"""The folder of the images goes away, comes back, is read-only: the daemon stays and says so."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.bus import busctl
from tests.support.harness import PROGRAMS, parse, wait_until
from tests.support.service import MANAGER, ROOT
from tests.system.service.test_end_to_end import NAME, phos, phosd


@contextmanager
def program(bus: str, folder: Path) -> Iterator[tuple[int, Path]]:
    single = [sys.executable, str(PROGRAMS / "single.py"), "0"]
    (started,) = phos(bus, folder, "run", "--gpu", "soft", "--detach", "--", *single)
    pid, output = int(str(started["pid"])), Path(str(started["stdout"]))
    try:
        wait_until(lambda: len(parse(output.read_bytes())) > 3, "the program to compute")
        yield pid, output
    finally:
        os.kill(pid, signal.SIGKILL)


def refused(bus: str, *words: str) -> str:
    """What a command of ``phos`` says when it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "phosd.cli.main", "--bus", bus, *words],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    return " ".join((done.stdout + done.stderr).split())


def troubles(bus: str) -> str:
    return busctl(bus, "get-property", NAME, ROOT, MANAGER, "Troubles")


def goes_on(output: Path) -> None:
    """The program computes."""
    before = len(parse(output.read_bytes()))
    wait_until(lambda: len(parse(output.read_bytes())) > before + 3, "the program to compute on")


def test_a_state_folder_that_goes_away_and_comes_back(bus: str, tmp_path: Path) -> None:
    state, elsewhere = tmp_path / "state", tmp_path / "elsewhere"
    with phosd(bus, tmp_path) as daemon, program(bus, tmp_path) as (pid, output):
        image = str(phos(bus, tmp_path, "checkpoint", str(pid))[-1]["result"])
        state.rename(elsewhere)
        for words in (("checkpoint", str(pid)), ("images",), ("verify", image), ("rm", image)):
            assert "bring the folder or its disk back" in refused(bus, *words), words
        goes_on(output)
        wait_until(lambda: "cannot be reached" in troubles(bus), "the history's trouble")
        assert [p["pid"] for p in phos(bus, tmp_path, "ps") if p["pid"] == pid] == [pid]
        assert not state.exists(), "nothing is written where the disk should be"
        elsewhere.rename(state)
        assert [i["id"] for i in phos(bus, tmp_path, "images")] == [image]
        saved = phos(bus, tmp_path, "checkpoint", str(pid))[-1]
        assert saved["state"] == "done"
        wait_until(lambda: "as 0" in troubles(bus), "the history to be written again")
        rows = phos(bus, tmp_path, "history")
        assert [row["state"] for row in rows[:1]] == ["done"]
        assert "failed" in {row["state"] for row in rows}, "also what happened meanwhile"
        assert daemon.poll() is None
    assert list((tmp_path / "run" / "journal").glob("*.json")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_state_folder_that_becomes_read_only(bus: str, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256M,mode=0700", "tmpfs", str(state)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("this root may not mount")
    try:
        with phosd(bus, tmp_path) as daemon, program(bus, tmp_path) as (pid, output):
            image = str(phos(bus, tmp_path, "checkpoint", str(pid))[-1]["result"])
            read_only = ["mount", "-o", "remount,bind,ro", str(state)]
            subprocess.run(["mount", "--bind", str(state), str(state)], check=True)
            subprocess.run(read_only, check=True)
            said = refused(bus, "checkpoint", str(pid))
            assert "read-only" in said
            goes_on(output)
            assert [i["id"] for i in phos(bus, tmp_path, "images")] == [image]
            subprocess.run(["umount", "--lazy", str(state)], check=True)
            assert phos(bus, tmp_path, "checkpoint", str(pid))[-1]["state"] == "done"
            assert daemon.poll() is None
    finally:
        subprocess.run(["umount", "--lazy", str(state)], check=True)


def test_a_configuration_with_mistakes_changes_nothing(bus: str, tmp_path: Path) -> None:
    config, log = tmp_path / "phosd.toml", tmp_path / "phosd.log"
    config.write_text("max_jobs = 1\n")
    with phosd(bus, tmp_path) as daemon:
        config.write_text('max_jobs = 2\n\n[[limits]]\nkeep = 0\n[[periodic]]\nevery = "x"\n')
        daemon.send_signal(signal.SIGHUP)
        wait_until(lambda: "stays as it was" in log.read_text(), "the refusal")
        said = log.read_text()
        assert f"{config}:4: limits.keep: 0 is not a number of images, at least 1" in said
        assert f'{config}:6: periodic.every: "x" is not a duration' in said
        assert "was read again" not in said
        config.write_text('max_jobs = 2\ncriu = "/bin/criu"\nmetrics = "127.0.0.1:1"\n')
        daemon.send_signal(signal.SIGHUP)
        wait_until(lambda: "was read again" in log.read_text(), "the new one")
        said = log.read_text()
        for name in ("criu", "metrics"):
            assert f"{name} takes effect when phosd starts again" in said
        assert "max_jobs takes" not in said
        config.unlink()
        daemon.send_signal(signal.SIGHUP)
        wait_until(lambda: f"{config}: there is no such file" in log.read_text(), "the refusal")
        assert log.read_text().count("stays as it was") == 2
        assert log.read_text().count("was read again") == 1
        daemon.send_signal(0)
