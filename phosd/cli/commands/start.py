"""Implement ``phos start``: start a program of a pool."""

import click

from phosd.cli.command import command
from phosd.cli.commands.migrate import tell_notes
from phosd.cli.job import watch
from phosd.cli.settings import Settings

_FROM = {"hollow": "which was hollow", "image": "from its image, since none waited"}


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
        settings.say(job["Result"])
