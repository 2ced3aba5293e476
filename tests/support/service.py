"""Run a service with a fake engine on a private bus, for tests of the service and the CLI."""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from phosd.bus import NAME, Connection
from phosd.service.api.compose import compose
from phosd.service.api.manager import Manager
from phosd.service.config import Config
from phosd.service.history.history import History
from tests.support.bus import busctl, private_bus
from tests.support.fake_engine import FakeEngine

ROOT = "/org/phos"
MANAGER = "org.phos.Manager1"


@pytest.fixture(scope="session")
def bus() -> Iterator[str]:
    # pytest's own folders are closed to other users, whom these tests need.
    with tempfile.TemporaryDirectory(prefix="phos-bus-") as folder:
        Path(folder).chmod(0o755)
        with private_bus(Path(folder)) as address:
            yield address


@dataclass
class Service:
    """The running service, and what a test needs to call it with the real busctl."""

    address: str
    config: Config
    engine: FakeEngine
    history: History
    """The service's own history: a second writer would interfere."""
    loop: asyncio.AbstractEventLoop
    connections: list[Connection]
    disconnect: Callable[[], None]
    """Disconnect from the bus at once, as a killed daemon does."""
    reconfigure: Callable[[Config], list[str]]
    """Apply another configuration, as SIGHUP does; returns the settings that need a restart."""

    def call(self, member: str, signature: str = "", *arguments: object, uid: int = 0) -> str:
        """Call a method of Manager1 through busctl."""
        parts = [signature, *map(str, arguments)] if signature else []
        return busctl(
            self.address, "call", NAME, ROOT, MANAGER, member, *parts, uid=uid or None
        ).strip()

    def start(self, member: str, signature: str, *arguments: object, uid: int = 0) -> str:
        """Call a method that returns a job; return the job's path."""
        return self.call(member, signature, *arguments, uid=uid).split('"')[1]

    def get(self, path: str, interface: str, name: str, uid: int = 0) -> str:
        """Return a property as busctl prints it, without the type."""
        line = busctl(
            self.address, "get-property", NAME, path, f"org.phos.{interface}", name, uid=uid or None
        )
        return line.strip().partition(" ")[2]


@pytest.fixture
def service(bus: str, tmp_path: Path) -> Iterator[Service]:
    config = Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run", rescan_seconds=0.5)
    config.runtime_dir.mkdir()
    with serving(bus, config, FakeEngine()) as service:
        yield service


@contextmanager
def serving(bus: str, config: Config, engine: FakeEngine) -> Iterator[Service]:
    """Run a service with these parts until the end of the block."""
    ready = threading.Event()
    failures: list[Exception] = []
    connections: list[Connection] = []
    managers: list[Manager] = []
    histories: list[History] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def run() -> None:
        connection = await Connection.open(bus)
        connections.append(connection)
        history = History(config.state_dir / "history.db")
        histories.append(history)
        manager = compose(config, engine, connection, history)
        managers.append(manager)
        assert await connection.own(NAME)
        await manager.settle()
        await manager.start()
        ready.set()
        await stop.wait()
        await manager.close()
        history.close()
        connection.close()
        await connection.closed()

    def disconnect() -> None:
        loop.call_soon_threadsafe(connections[0].close)

    def reconfigure(new: Config) -> list[str]:
        async def take_over() -> list[str]:
            return managers[0].reconfigure(new)

        return asyncio.run_coroutine_threadsafe(take_over(), loop).result(60)

    def body() -> None:
        try:
            loop.run_until_complete(run())
        except Exception as error:
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=body)
    thread.start()
    ready.wait()
    assert not failures, failures
    try:
        yield Service(bus, config, engine, histories[0], loop, connections, disconnect, reconfigure)
    finally:
        engine.go.set()
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
    assert not failures, failures


def phosd(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the real daemon until it exits."""
    return subprocess.run(
        [sys.executable, "-m", "phosd.service.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
    )
