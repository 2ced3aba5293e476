"""``phosd``: the daemon. One event loop, no CUDA call on it."""

import argparse
import asyncio
import dataclasses
import logging
import signal
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from phosd import __version__
from phosd.bus import NAME, CallError, Connection, NoBusError
from phosd.engine.errors import PhosError
from phosd.service import config as configuration
from phosd.service.config import Config, ConfigError
from phosd.service.history import History
from phosd.service.manager import Manager
from phosd.service.operations import Engine

_log = logging.getLogger("phosd")
_POLICY_HINT = (
    "run phosd as root, and put systemd/org.phos.conf into /etc/dbus-1/system.d (or use --session)"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of ``phosd``."""
    parser = _parser()
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        config = _configure(args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    if args.check_config:
        for field in dataclasses.fields(Config):
            print(f"{field.name} = {getattr(config, field.name)}")
        return
    try:
        sys.exit(asyncio.run(_run(config, args)))
    except (PhosError, OSError, sqlite3.Error) as error:
        _log.error("phosd cannot go on: %s", error)
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phosd", description="Checkpoints and restores the GPU processes of this node."
    )
    parser.add_argument("--version", action="version", version=f"phosd {__version__}")
    parser.add_argument(
        "--session", action="store_true", help="serve the session bus instead of the system's"
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=configuration.DEFAULT_FILE,
        metavar="FILE",
        help="configuration (default: %(default)s)",
    )
    parser.add_argument("--state-dir", type=Path, metavar="DIR", help="images and history")
    parser.add_argument("--runtime-dir", type=Path, metavar="DIR", help="hook sockets, journal")
    parser.add_argument(
        "--check-config", action="store_true", help="explain every mistake, print what holds, exit"
    )
    return parser


def _configure(args: argparse.Namespace) -> Config:
    """The file, then what the command line says instead."""
    config = configuration.load(args.config)
    given = {
        name: getattr(args, name).absolute()
        for name in ("state_dir", "runtime_dir")
        if getattr(args, name) is not None
    }
    return dataclasses.replace(config, **given)


async def _run(config: Config, args: argparse.Namespace) -> int:
    from phosd.service.node_engine import NodeEngine

    prepare_folders(config)
    with closing(NodeEngine(config)) as engine:
        return await serve(config, engine, "session" if args.session else "system", args.config)


async def serve(config: Config, engine: Engine, where: str, config_file: Path) -> int:
    """Serve a bus until SIGTERM, SIGINT or its end; the exit status."""
    try:
        connection = await Connection.open(where)
    except NoBusError as error:
        _log.error("%s; %s", error, error.hint)
        return 1
    with closing(connection), closing(History(config.state_dir / "history.db")) as history:
        manager = Manager(config, engine, connection, history)
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
            _log.info("phosd %s serves %s on the %s bus", __version__, NAME, where)
            await _until_told(connection, manager, config_file)
        finally:
            await manager.close()
    return 0


async def _until_told(connection: Connection, manager: Manager, config_file: Path) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, _reload, manager, config_file)
    gone = loop.create_task(connection.closed())
    told = loop.create_task(stop.wait())
    await asyncio.wait((gone, told), return_when=asyncio.FIRST_COMPLETED)
    if gone.done():
        _log.error("the bus is gone")


def _reload(manager: Manager, config_file: Path) -> None:
    """SIGHUP: read the file again. A file with mistakes changes nothing."""
    try:
        new = configuration.load(config_file)
    except ConfigError as error:
        _log.error("the configuration stays as it was:\n%s", error)
        return
    for name in manager.reconfigure(new):
        _log.warning("%s takes effect when phosd starts again", name)
    _log.info("%s was read again", config_file)


def prepare_folders(config: Config) -> None:
    """Make the folders that the history and the journal need before the engine does."""
    config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    config.runtime_dir.mkdir(mode=0o755, parents=True, exist_ok=True)


if __name__ == "__main__":
    main()
