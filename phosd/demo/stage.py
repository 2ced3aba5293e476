"""What the demonstration needs around it: folders, a private bus, a daemon, a program; and no trace
of them afterwards.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from phosd.client import AsyncClient
from phosd.engine.system.native import python_environment
from phosd.errors import NoDaemon

TIMEOUT = 45.0
"""Seconds that any single step may take."""

BUS_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>session</type>
  <listen>unix:path={socket}</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow send_destination="*"/>
    <allow receive_sender="*"/>
    <allow own="*"/>
  </policy>
</busconfig>
"""
"""A bus of one user's own; ``socket`` is its path."""


class DemoError(Exception):
    """The demonstration cannot go on; the text says why."""


async def until(condition: Callable[[], Any], what: str, patience: float = TIMEOUT) -> Any:
    """The first true value of ``condition``. Raises :class:`DemoError` naming ``what``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience
    while loop.time() < deadline:
        if value := condition():
            return value
        await asyncio.sleep(0.02)
    raise DemoError(f"waited {patience:.0f} s in vain for {what}")


@contextlib.asynccontextmanager
async def folder() -> AsyncIterator[Path]:
    """A folder of our own, removed at the end. The name is short: sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="phos-demo-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.asynccontextmanager
async def running(
    command: Sequence[str], log: Path, env: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that is ended at the end; what it says goes to ``log``."""
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            # Ctrl-C at a terminal is ours to handle; the helpers end when we end them.
            start_new_session=True,
        )
    try:
        yield process
    finally:
        await end(process)


async def end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL to whoever does not listen."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def private_bus(place: Path) -> AsyncIterator[str]:
    """A D-Bus of our own; its address."""
    if shutil.which("dbus-daemon") is None:
        raise DemoError("dbus-daemon is not installed; `make demo` installs it")
    socket, config = place / "bus", place / "bus.conf"
    config.write_text(BUS_CONFIG.format(socket=socket))
    command = ["dbus-daemon", f"--config-file={config}", "--nofork", "--nopidfile"]
    async with running(command, place / "bus.log", dict(os.environ)):
        await until(socket.exists, "the private D-Bus")
        yield f"unix:path={socket}"


@contextlib.asynccontextmanager
async def daemon(
    place: Path, address: str, options: Sequence[str] = ()
) -> AsyncIterator[AsyncClient]:
    """phosd on the private bus, with more ``options``; a client of it."""
    log = place / "phosd.log"
    env = python_environment() | {"DBUS_SESSION_BUS_ADDRESS": address}
    command = [sys.executable, "-m", "phosd.service.main", "--session"]
    command += [f"--state-dir={place / 'state'}", f"--runtime-dir={place / 'run'}", *options]
    async with running(command, log, env) as process, await AsyncClient.connect(address) as client:
        await _answering(client, process, log)
        yield client


async def _answering(client: AsyncClient, process: asyncio.subprocess.Process, log: Path) -> None:
    """Wait until phosd has its name on the bus."""
    for _ in range(int(TIMEOUT / 0.05)):
        if process.returncode is not None:
            raise DemoError(f"phosd ended: {log.read_text()[-2000:].strip()}")
        try:
            await client.manager()
        except NoDaemon:
            await asyncio.sleep(0.05)
        else:
            return
    raise DemoError(f"phosd does not answer: {log.read_text()[-2000:].strip()}")


@contextlib.asynccontextmanager
async def program(place: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """The training, started as a user would start it: under ``phos run``."""
    env = python_environment() | {
        "PHOS_RUNTIME_DIR": str(place / "run"),
        "XDG_STATE_HOME": str(place / "home"),
    }
    command = [sys.executable, "-m", "phosd.cli.main", "run", "--"]
    command += [sys.executable, "-m", "phosd.demo.train"]
    async with running(command, place / "run.log", env) as process:
        yield process


class Training:
    """The training process: its pid, which a restore keeps, and the losses that it printed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # The file that `phos run` gave it as standard output; a restore appends to the same.
        self._output = Path(f"/proc/{pid}/fd/1").resolve(strict=True)

    def position(self) -> int:
        """Where its output ends now, in bytes."""
        return self._output.stat().st_size

    def losses(self, since: int = 0) -> dict[int, str]:
        """The loss of each step printed from byte ``since`` on, with all its digits."""
        lines = self._output.read_bytes()[since:].decode().split("\n")[:-1]
        pairs = (line.partition(" ") for line in lines)
        return {int(step): loss for step, _, loss in pairs if step.isdigit()}

    def alive(self) -> bool:
        """Whether the process runs (a zombie does not)."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] not in ("Z", "X")

    async def kill(self) -> None:
        """SIGKILL; returns when the pid is free."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{self.pid}").exists(), f"the end of {self.pid}")
