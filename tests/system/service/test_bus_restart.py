"""The bus goes away during a job, and comes back or not."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from phosd.bus import NAME, CallError, Connection
from phosd.service.api.compose import compose
from phosd.service.config import Config
from phosd.service.history.history import History
from tests.support.bus import busctl, start_bus
from tests.support.fake_engine import FakeEngine
from tests.support.harness import PATIENCE, wait_until
from tests.support.service import MANAGER, ROOT

JOB = "/org/phos/job/_1"


class RestartableBus:
    """A bus that can be killed and started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemon, self.address = start_bus(folder)

    def kill(self) -> None:
        self.daemon.kill()
        self.daemon.wait()

    def start(self) -> None:
        self.daemon, address = start_bus(self.folder)
        assert address == self.address


@pytest.fixture
def bus() -> Iterator[RestartableBus]:
    with tempfile.TemporaryDirectory(prefix="phos-bus-") as folder:
        Path(folder).chmod(0o755)
        bus = RestartableBus(Path(folder))
        yield bus
        bus.kill()


@asynccontextmanager
async def daemon(
    bus: RestartableBus, folder: Path, engine: FakeEngine, patience: float
) -> AsyncIterator[asyncio.Task[None]]:
    """A daemon; gives the task that ends when the bus has gone for good."""
    config = Config(state_dir=folder / "state", runtime_dir=folder / "run")
    config.runtime_dir.mkdir()
    connection = await Connection.open(bus.address, patience)
    history = History(config.state_dir / "history.db")
    manager = compose(config, engine, connection, history)
    assert await connection.own(NAME)
    await manager.start()
    closed = asyncio.create_task(connection.closed())
    try:
        yield closed
    finally:
        engine.go.set()
        await manager.close()
        history.close()
        connection.close()
        await closed


def sockets() -> int:
    """How many this process has open; those of attempts that failed go with their garbage."""
    gc.collect()
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(link.readlink()).startswith("socket:")
    return found


async def eventually(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(wait_until, condition, what)


def call(bus: RestartableBus, *arguments: object, uid: int | None = None) -> str:
    command = ("call", NAME, ROOT, MANAGER, *map(str, arguments))
    return busctl(bus.address, *command, uid=uid)


def answers(bus: RestartableBus) -> bool:
    try:
        return bool(call(bus, "ListJobs"))
    except RuntimeError:
        return False


def test_a_job_goes_on_and_is_on_the_bus_again(bus: RestartableBus, tmp_path: Path) -> None:
    engine = FakeEngine()

    async def run() -> None:
        async with daemon(bus, tmp_path, engine, patience=PATIENCE):
            await asyncio.to_thread(call, bus, "Checkpoint", "ua{sv}", os.getpid(), 0)
            bus.kill()
            await asyncio.sleep(0.3)
            await asyncio.to_thread(bus.start)
            await eventually(lambda: answers(bus), "phosd to be back")
            listed = await asyncio.to_thread(call, bus, "ListJobs")
            assert f'1 "checkpoint" "{os.getpid()}" "running" "{JOB}"' in listed
            # A client that leaves is noticed on the new bus, too, and a signal reaches it.
            heard: list[str] = []
            client = await Connection.open(bus.address)
            await client.subscribe(lambda s: heard.append(s.member), "sender='org.phos'")
            engine.go.set()
            await eventually(lambda: "JobRemoved" in heard, "the end of the job")
            client.close()
            assert '"done"' in await asyncio.to_thread(call, bus, "ListJobs")

    asyncio.run(run())


def test_the_bus_may_restart_again_and_again(bus: RestartableBus, tmp_path: Path) -> None:
    async def run() -> None:
        async with daemon(bus, tmp_path, FakeEngine(), patience=PATIENCE):
            before = sockets()
            for _ in range(4):
                bus.kill()
                await asyncio.to_thread(bus.start)
                await eventually(lambda: answers(bus), "phosd to be back")
            await eventually(lambda: sockets() <= before, "the old connections to be closed")

    asyncio.run(run())


def test_a_bus_that_stays_away_ends_phosd_and_no_call_hangs(
    bus: RestartableBus, tmp_path: Path
) -> None:
    async def run() -> None:
        async with daemon(bus, tmp_path, FakeEngine(), patience=1.0) as closed:
            client = await Connection.open(bus.address)
            asked = asyncio.create_task(
                client.call(ROOT, MANAGER, "DeleteImage", "sa{sv}", "x", {})
            )
            bus.kill()
            with pytest.raises(CallError):
                await asked
            with pytest.raises(CallError, match="the bus is gone"):
                await client.call(ROOT, MANAGER, "ListJobs")
            await asyncio.wait_for(closed, PATIENCE)
            await client.closed()

    asyncio.run(run())


def test_the_real_daemon_fails_when_the_bus_stays_away(bus: RestartableBus, tmp_path: Path) -> None:
    """systemd starts it again after that."""
    code = (
        "import phosd.service.main as m, sys; m.BUS_TIMEOUT = 0.5; "
        f"m.main(['--session', '--state-dir', '{tmp_path}/s', '--runtime-dir', '{tmp_path}/r'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"DBUS_SESSION_BUS_ADDRESS": bus.address},
    ) as phosd:
        try:
            wait_until(lambda: answers(bus), "phosd")
            bus.kill()
            assert phosd.wait(PATIENCE) == 1
        finally:
            if phosd.poll() is None:
                phosd.send_signal(signal.SIGKILL)


def test_phos_does_not_wait_for_a_bus_that_is_gone(bus: RestartableBus, tmp_path: Path) -> None:
    async def run() -> None:
        async with daemon(bus, tmp_path, FakeEngine(), patience=1.0):
            phos = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "phosd.cli.main", "--bus", bus.address),
                *("checkpoint", str(os.getpid())),
                stderr=subprocess.PIPE,
            )
            await eventually(lambda: "running" in call(bus, "ListJobs"), "the job")
            await asyncio.sleep(0.5)  # it has its answer and watches
            bus.kill()
            _, said = await asyncio.wait_for(phos.communicate(), PATIENCE)
            assert phos.returncode == 1
            assert b"bus" in said

    asyncio.run(run())
