"""Run ``phosd``, the daemon: one event loop, which makes no CUDA call."""

import argparse
import asyncio
import faulthandler
import json
import logging
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgspec

from phosd import __version__
from phosd.bus import NAME, CallError, Connection, NoBusError
from phosd.engine.system import unsandboxed
from phosd.engine.system.instance_lock import alone
from phosd.engine.system.sd_notify import Supervisor
from phosd.errors import PhosError
from phosd.service import config as configuration
from phosd.service.api.compose import compose
from phosd.service.api.manager import Manager
from phosd.service.config import Config, ConfigError
from phosd.service.history.history import History
from phosd.service.jobs import job_log
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.table import JobState

_STATUS_SECONDS = 1.0
BUS_TIMEOUT = 60.0
"""Seconds to wait for a bus that is gone before phosd exits and is restarted together with its
clients.
"""
_log = logging.getLogger("phosd")
_POLICY_HINT = (
    "run phosd as root, and put systemd/org.phos.conf into /etc/dbus-1/system.d (or use --session)"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``phosd`` from the command line."""
    args = parser().parse_args(arguments)
    if args.config_schema:
        print(json.dumps(configuration.json_schema(), indent=2))
        return
    faulthandler.enable()  # so that the watchdog's SIGABRT prints where each thread was
    job_log.begin()
    try:
        config = _configure(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    if args.check_config:
        print(configuration.as_toml(config), end="")
        return
    try:
        sys.exit(asyncio.run(_run(config, args)))
    except (PhosError, OSError, sqlite3.Error) as error:
        _log.error("phosd cannot go on: %s", error)
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    """Return the command line parser of ``phosd``."""
    made = argparse.ArgumentParser(
        prog="phosd", description="Checkpoints and restores the GPU processes of this node."
    )
    made.add_argument("--version", action="version", version=f"phosd {__version__}")
    made.add_argument(
        "--session", action="store_true", help="serve the session bus instead of the system's"
    )
    made.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"configuration (default: {configuration.DEFAULT_FILE}, if there is one)",
    )
    made.add_argument("--state-dir", type=Path, metavar="DIR", help="images and history")
    made.add_argument("--runtime-dir", type=Path, metavar="DIR", help="hook sockets, journal")
    made.add_argument(
        "--check-config",
        action="store_true",
        help="explain every mistake, print the settings, exit",
    )
    made.add_argument(
        "--config-schema",
        action="store_true",
        help="print the JSON schema of the configuration, exit",
    )
    return made


def _configure(args: argparse.Namespace) -> Config:
    """Load the configuration file and apply the options of the command line."""
    config = configuration.load(_config_file(args), optional=args.config is None)
    given = {
        name: getattr(args, name).absolute()
        for name in ("state_dir", "runtime_dir")
        if getattr(args, name) is not None
    }
    return msgspec.structs.replace(config, **given)


def _config_file(args: argparse.Namespace) -> Path:
    return args.config or configuration.DEFAULT_FILE


async def _run(config: Config, args: argparse.Namespace) -> int:
    from phosd.service.tasks.local_engine import NodeEngine

    prepare_folders(config)
    _check_units(config)
    with alone(config.state_dir, config.runtime_dir), closing(NodeEngine(config)) as engine:
        where = "session" if args.session else "system"
        return await serve(config, engine, where, _config_file(args))


def _check_units(config: Config) -> None:
    """Warn when ``runtime_dir`` is not the folder that the systemd units were made for."""
    from phosd.engine.mover.client.launcher import MOVER_UNIT

    door = config.runtime_dir / unsandboxed.SOCKET
    if os.environ.get(MOVER_UNIT) and not door.is_socket():
        _log.warning(
            "CRIU is not to be reached at %s, so nothing can be saved or restored; leave"
            " runtime_dir as it is, or change it in phosd-criu.socket and phosd-mover@.service,"
            " too (`systemctl edit`)",
            door,
        )


async def serve(config: Config, engine: Engine, where: str, config_file: Path) -> int:
    """Serve a bus until SIGTERM or SIGINT, and return the exit status. It is 1 when the bus is gone
    for good, so that the service manager restarts phosd.
    """
    supervisor = Supervisor()
    stop = _stop_signals()
    try:
        connection = await Connection.open(where, patience=BUS_TIMEOUT)
    except NoBusError as error:
        _log.error("%s; %s", error, error.hint)
        return 1
    with closing(connection), closing(History(config.state_dir / "history.db")) as history:
        manager = compose(config, engine, connection, history)
        supervisor.status("Settling what an earlier phosd has left")
        async with _alongside(supervisor.prolong()):
            await manager.settle()
        try:
            owned = await connection.own(NAME)
        except CallError as error:
            _log.error("the bus does not let us be %s: %s; %s", NAME, error.text, _POLICY_HINT)
            return 1
        if not owned:
            _log.error("%s is taken on this bus: another phosd runs", NAME)
            return 1
        try:
            await manager.start()
            _reload_on_hangup(manager, config_file, supervisor)
            _log.info("phosd %s serves %s on the %s bus", __version__, NAME, where)
            supervisor.ready()
            async with _alongside(supervisor.feed(), _tell_status(manager, supervisor)):
                told = await _until_told(connection, stop)
        finally:
            supervisor.stopping()
            async with _alongside(supervisor.prolong(), supervisor.feed()):
                await manager.close()
    return 0 if told else 1


def _stop_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set from now on, even while phosd still starts."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _until_told(connection: Connection, stop: asyncio.Event) -> bool:
    """Wait for a stop signal (return true) or for the end of the bus (return false)."""
    async with _alongside(connection.closed(), stop.wait()) as tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not stop.is_set():
        _log.error("the bus is gone")
    return stop.is_set()


@asynccontextmanager
async def _alongside(*work: Coroutine[Any, Any, object]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run coroutines in the background of the ``with`` block, and cancel them at its end."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _tell_status(manager: Manager, supervisor: Supervisor) -> None:
    while True:
        states = [job.state for job in manager.jobs]
        running, queued = states.count(JobState.RUNNING), states.count(JobState.QUEUED)
        refused = "; phosd.toml has mistakes, and is not in use" * bool(manager.maintenance.refused)
        supervisor.status(f"Jobs: {running} running, {queued} waiting{refused}")
        await asyncio.sleep(_STATUS_SECONDS)


def _reload_on_hangup(manager: Manager, config_file: Path, supervisor: Supervisor) -> None:
    def reload() -> None:
        with supervisor.reloading():
            _reload(manager, config_file)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def _reload(manager: Manager, config_file: Path) -> None:
    """Read the configuration again on SIGHUP. A missing file or one with mistakes changes nothing:
    quotas must not vanish because an editor has moved the file away.
    """
    try:
        new = configuration.load(config_file)
    except ConfigError as error:
        _log.error("the configuration stays as it was:\n%s", error)
        manager.maintenance.refused = (
            f"{config_file} could not be read again, so phosd goes on with older settings: "
            f"{'; '.join(error.problems)}; mend that (`phosd --check-config`), and `systemctl "
            "reload phosd`"
        )
        return
    manager.maintenance.refused = ""
    for name in manager.reconfigure(new):
        _log.warning("%s takes effect when phosd starts again", name)
    _log.info("%s was read again", config_file)


def prepare_folders(config: Config) -> None:
    """Make the folders for the history and the journal before the engine starts.

    The default state folder is always closed to others. One that the administrator has chosen may
    serve other purposes: if it is open to others, phosd says so and ends.
    """
    config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    config.runtime_dir.mkdir(mode=0o755, parents=True, exist_ok=True)
    is_open = config.state_dir.stat().st_mode & 0o077
    if is_open and config.state_dir == configuration.STATE_DIR:
        config.state_dir.chmod(0o700)
        _log.warning("%s was open to others and is closed now", config.state_dir)


if __name__ == "__main__":
    main()
