"""Implement ``phos recover``: resume processes that were left locked, checkpointed or parked."""

import os
import sys
from pathlib import Path

import click

from phosd.bus import CallError, NoBusError
from phosd.cli import options
from phosd.cli.client import call
from phosd.cli.command import command
from phosd.cli.run_command.environment import DEFAULT_RUNTIME
from phosd.cli.settings import Settings
from phosd.client.errors import Exit, of_bus
from phosd.engine.recovery.rescue import bring_back
from phosd.engine.recovery.stranded import stranded


@command()
@click.argument("pids", metavar="[PID]...", nargs=-1, type=options.PID)
@click.option(
    "--runtime-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"Where hooks and data movers are (default: {DEFAULT_RUNTIME}).",
)
def recover(settings: Settings, pids: tuple[int, ...], runtime_dir: Path | None) -> None:
    """Bring back programs that were left stopped. They are locked, checkpointed or parked.

    A phosd that was killed leaves processes so (the next one brings them back by itself when it
    starts), and so may another tool (`cuda-checkpoint`). As root this needs no phosd; other users'
    requests go to phosd. Without a PID it lists such processes.

    \b
    Examples:
      phos recover
      phos recover 4711
    """
    place = runtime_dir or Path(os.environ.get("PHOS_RUNTIME_DIR", DEFAULT_RUNTIME))
    if not pids:
        _list(settings, place.absolute())
    by_daemon = runtime_dir is None and os.geteuid() != 0
    left: list[int] = []

    def recover_one(pid: int) -> None:
        if not (by_daemon and _ask(settings, pid)) and not _recover(
            settings, pid, place.absolute()
        ):
            left.append(pid)

    settings.each("pid", pids, recover_one)
    if left:
        sys.exit(Exit.FAILED)


def _list(settings: Settings, runtime_dir: Path) -> None:
    rows = [
        {"pid": each.pid, "state": each.why, "certain": each.certain}
        for each in stranded(runtime_dir)
    ]
    settings.rows(rows, {"PID": lambda row: str(row["pid"]), "IS": lambda row: str(row["state"])})
    if not rows and not settings.json:
        settings.say("no process is left locked, checkpointed or parked")


def _ask(settings: Settings, pid: int) -> bool:
    """Ask the daemon to recover the process; return false when no daemon runs. Raises
    :class:`CallError`.
    """
    try:
        done = call(settings, "Recover", pid)
    except NoBusError:
        return False
    except CallError as error:
        if of_bus(error, settings.bus).code == "NoDaemon":
            return False
        raise
    if settings.json:
        settings.emit({"pid": pid, "runs": True, "message": done})
    else:
        settings.say(done)
    return True


def _recover(settings: Settings, pid: int, runtime_dir: Path) -> bool:
    """Recover the process without a daemon, report each process of its group, and return whether it
    runs.
    """
    account = bring_back(pid, runtime_dir)
    for each in sorted({pid, *account.deeds, *account.failures}):
        failure = account.failures.get(each)
        text = account.text([each]) or f"process {each} runs; there was nothing to do"
        if settings.json:
            deeds = account.deeds.get(each, [])
            settings.emit({"pid": each, "runs": failure is None, "done": deeds, "message": text})
        elif failure is None:
            settings.say(text)
        else:
            settings.note(text)
    return pid not in account.failures
