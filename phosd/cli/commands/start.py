"""Implement ``phos start``: start a program of a pool."""

from contextlib import suppress
from pathlib import Path

import click

from phosd.cli.client import ask, call
from phosd.cli.command import command
from phosd.cli.commands.migrate import tell_notes
from phosd.cli.job import watch
from phosd.cli.parameters import Duration
from phosd.cli.passed_sockets import (
    Served,
    only_door,
    require_proxy,
    require_sockets,
    told_later,
)
from phosd.cli.settings import Settings
from phosd.client.daemon import Properties
from phosd.interface.methods import PROCESS

_FROM = {
    "ready": "which was ready",
    "hollow": "which was hollow",
    "image": "from its image, since none waited",
}


@command()
@click.argument("name")
@click.option(
    "--serve",
    is_flag=True,
    help="Pass those who call the sockets that systemd has passed on to the program, and end it "
    "when this ends.",
)
@click.option(
    "--idle",
    type=Duration(least=1),
    help="With --serve: end when there was no connection for so long.",
)
def start(settings: Settings, name: str, serve: bool, idle: float | None) -> None:
    """Start a program of a pool. Its pid is printed. One that waits starts in a moment; if none
    does, one is restored.

    With --serve it is what a .socket unit of systemd starts when somebody calls.

    \b
    Examples:
      phos start chat
      kill $(phos start chat)             and end it again
      systemd-socket-activate -l 8000 phos start chat --serve --idle 5min
    """
    if idle is not None and not serve:
        raise click.UsageError("--idle says for how long to --serve")
    if not serve:
        _tell(settings, watch(settings, "StartPooled", name))
        return
    if settings.nodes:
        raise click.UsageError("--serve is for a program of this machine")
    sockets, proxy = require_sockets(), require_proxy()
    with told_later():
        job = watch(settings, "StartPooled", name)
        pid = int(job["Result"])
        with Served(pid) as served:
            served.take_signals()
            _tell(settings, job)
            doors = ask(settings, call(settings, "GetProcess", pid), PROCESS, "ListDoors")
            served.serve(proxy, sockets, only_door(pid, doors), idle)


def _tell(settings: Settings, job: Properties) -> None:
    if not settings.json:
        tell_notes(settings, job)
        seconds = (job["Ended"] - job["Started"]) / 1e6
        came = _FROM.get(job["Mode"], "")
        settings.note(f"process {job['Result']} runs, {came}, after {seconds:.2f} s")
        if not settings.nodes and (place := _output_of(job["Result"])):
            settings.note(f"its output goes on in {place}")
        settings.say(job["Result"])


def _output_of(pid: str) -> str:
    """Return the file to which a process of this machine prints; empty if it is none."""
    with suppress(OSError):  # it has ended, or is another user's
        place = Path(f"/proc/{pid}/fd/1").readlink()
        return str(place) if place.is_file() else ""
    return ""
