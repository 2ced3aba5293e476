"""What the daemon tells its service manager, and when."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.bus import NAME
from phosd.engine.system.sd_notify import Supervisor
from tests.support.bus import busctl, private_bus
from tests.support.harness import PATIENCE, wait_until


class Manager:
    """The listening side: a service manager that only writes down."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(0.01)
        self.heard: list[str] = []

    def lines(self) -> list[str]:
        """Everything that was said until now, a line each."""
        while True:
            try:
                self.heard += self.socket.recv(4096).decode().split("\n")
            except TimeoutError:
                return self.heard

    def wait_for(self, line: str, count: int = 1) -> None:
        wait_until(lambda: self.lines().count(line) >= count, f"{line} in {self.heard}")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    listening = Manager(str(tmp_path / "notify"))
    yield listening
    listening.socket.close()


def supervisor(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Supervisor:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return Supervisor()


def test_paths_and_abstract_names(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor(monkeypatch, NOTIFY_SOCKET=str(tmp_path / "notify")).ready()
    assert manager.lines() == ["READY=1"]
    assert "NOTIFY_SOCKET" not in os.environ, "what we start must not speak for us"
    name = f"phos-test-{os.getpid()}"
    abstract = Manager("\0" + name)
    one = supervisor(monkeypatch, NOTIFY_SOCKET="@" + name)
    for _ in range(2):
        one.status("two\nlines")
    assert abstract.lines() == ["STATUS=two lines"], "told once, as one line"
    abstract.socket.close()


@pytest.mark.parametrize("address", ["", "@", "relative", "/nowhere/at/all"])
def test_nobody_to_tell(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = supervisor(monkeypatch, NOTIFY_SOCKET=address)
    nobody.ready()
    with nobody.reloading():
        nobody.stopping()


def test_a_manager_that_does_not_read_holds_nobody_up(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = supervisor(monkeypatch, NOTIFY_SOCKET=str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler:
        filler.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                filler.sendto(b"full", str(tmp_path / "notify"))
    one.ready()
    assert "READY=1" not in manager.lines()
    one.ready()
    assert "READY=1" in manager.lines()


def test_only_a_living_event_loop_feeds_the_watchdog(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = str(tmp_path / "notify")
    fed = supervisor(monkeypatch, NOTIFY_SOCKET=address, WATCHDOG_USEC="60000")
    assert fed.watchdog == 0.06

    async def live() -> None:
        feeding = asyncio.create_task(fed.feed())
        while manager.lines().count("WATCHDOG=1") < 3:
            await asyncio.sleep(0.01)
        manager.lines()
        before = manager.heard.count("WATCHDOG=1")
        time.sleep(0.3)  # the loop hangs
        assert manager.lines().count("WATCHDOG=1") == before
        feeding.cancel()

    asyncio.run(asyncio.wait_for(live(), PATIENCE))
    others = supervisor(monkeypatch, WATCHDOG_USEC="60000", WATCHDOG_PID="1")
    assert others.watchdog == 0, "it is another process that is watched"


@contextmanager
def daemon(bus: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "phosd.service.main", "--session"]
    command += [f"--{name}={folder / name}" for name in ("state-dir", "runtime-dir", "config")]
    (folder / "config").touch()
    variables = {
        "DBUS_SESSION_BUS_ADDRESS": bus,
        "NOTIFY_SOCKET": str(folder / "notify"),
        "WATCHDOG_USEC": "1000000",
    }
    with subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def findings(bus: str) -> list[dict[str, str]]:
    """What root's `phos doctor` finds wrong with phosd."""
    words = [sys.executable, "-m", "phosd.cli.main", "--bus", bus, "doctor", "--json"]
    told = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False).stdout
    found = [json.loads(line) for line in told.splitlines()]
    return [each for each in found if each["subject"] == "daemon" and each["level"] != "ok"]


def test_the_life_of_a_daemon(manager: Manager, tmp_path: Path) -> None:
    with private_bus(tmp_path) as bus, daemon(bus, tmp_path) as process:
        manager.wait_for("READY=1")
        assert NAME in busctl(bus, "list", "--acquired")
        manager.wait_for("STATUS=Jobs: 0 running, 0 waiting")
        manager.wait_for("WATCHDOG=1", 3)

        process.send_signal(signal.SIGHUP)
        manager.wait_for("READY=1", 2)
        (at,) = (n for n, line in enumerate(manager.heard) if line == "RELOADING=1")
        assert manager.heard[at + 1].startswith("MONOTONIC_USEC=")
        assert "READY=1" in manager.heard[at:]

        (tmp_path / "config").write_text("max_job = 3\n")
        process.send_signal(signal.SIGHUP)
        refused = "; phosd.toml has mistakes, and is not in use"
        manager.wait_for(f"STATUS=Jobs: 0 running, 0 waiting{refused}")
        (trouble,) = findings(bus)
        assert "goes on with older settings" in trouble["text"] and "max_job" in trouble["text"]
        assert "systemctl reload phosd" in trouble["mend"]
        (tmp_path / "config").write_text("max_jobs = 3\n")
        process.send_signal(signal.SIGHUP)
        manager.wait_for("STATUS=Jobs: 0 running, 0 waiting", 2)
        assert findings(bus) == []

        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        lines = manager.lines()
        assert "STOPPING=1" in lines
        assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in lines)


def test_a_daemon_that_cannot_start_is_never_ready(manager: Manager, tmp_path: Path) -> None:
    with daemon("unix:path=/nowhere", tmp_path) as process:
        assert process.wait(PATIENCE) == 1
    assert "READY=1" not in manager.lines()


def test_a_runtime_folder_that_the_units_are_not_made_for(manager: Manager, tmp_path: Path) -> None:
    """CRIU would have to run in phosd's sandbox: it says so, at once."""
    with pytest.MonkeyPatch.context() as patch, private_bus(tmp_path) as bus:
        patch.setenv("PHOS_MOVER_UNIT", "phosd-mover@.service")
        with daemon(bus, tmp_path) as process:
            manager.wait_for("READY=1")
            process.terminate()
            assert process.stderr is not None
            assert b"CRIU is not to be reached at" in process.stderr.read()
            assert process.wait(PATIENCE) == 0
