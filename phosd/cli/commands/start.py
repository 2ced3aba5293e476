"""Implement ``phos start``: start a program of a pool."""

from contextlib import suppress
from pathlib import Path

import click

from phosd.cli.command import command
from phosd.cli.commands.migrate import tell_notes
from phosd.cli.job import watch
from phosd.cli.settings import Settings

_FROM = {
    "ready": "which was ready",
    "hollow": "which was hollow",
    "image": "from its image, since none waited",
}


@command()
@click.argument("name")
def start(settings: Settings, name: str) -> None:
    """Start a program of a pool. Its pid is printed. One that waits starts in a moment; if none
    does, one is restored.

    \b
    Examples:
      phos start chat
      kill $(phos start chat)             and end it again
    """
    job = watch(settings, "StartPooled", name)
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
