"""Implement ``phos wait``: wait until a program has ended."""

import os
import select
import sys
from pathlib import Path

import click

from phosd.cli import options
from phosd.cli.command import command
from phosd.cli.parameters import Duration
from phosd.cli.run_command.program import END, await_end
from phosd.cli.run_command.relay import exit_code
from phosd.cli.settings import Settings
from phosd.client.errors import CommandError
from phosd.engine.program.process import output_files

_END_SECONDS = 2.0


@command()
@click.argument("pid", metavar="PROGRAM", type=options.PID)
@click.option("--timeout", type=Duration(least=0), help="Give up after this long.")
def wait(settings: Settings, pid: int, timeout: float | None) -> None:
    """Wait until a program has ended. The exit code is the program's, if `phos run` started it in
    the foreground or resumed it; otherwise it is 0. No daemon is needed.

    \b
    Examples:
      phos wait 4711
      phos wait bert
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise CommandError(
            "NoSuchProcess", f"there is no process {pid}; `phos ps` lists those that use a GPU"
        ) from error
    outputs = output_files(pid)
    _wait(pidfd, timeout, pid)
    status = await_end(Path(outputs[0]).with_name(END), _END_SECONDS) if outputs else None
    if settings.json:
        settings.emit({"pid": pid, "status": status})
    elif status is None:
        settings.note(f"process {pid} has ended; how is not known")
    else:
        settings.note(f"process {pid} has ended: {_told(status)}")
    sys.exit(exit_code(status or 0))


def _wait(pidfd: int, timeout: float | None, pid: int) -> None:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    if not ended.poll(None if timeout is None else timeout * 1000):
        raise CommandError("Timeout", f"process {pid} still runs after {timeout:g} s; wait again")


def _told(status: int) -> str:
    return f"exit code {status}" if status >= 0 else f"signal {-status}"
