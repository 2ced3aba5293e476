"""Implement ``phos swap``: let two programs take turns on a GPU."""

from typing import Any

import click

from phosd.cli import options
from phosd.cli.command import command
from phosd.cli.commands.migrate import tell_notes
from phosd.cli.job import watch
from phosd.cli.settings import Settings
from phosd.interface.move_options import SuspendOptions


@command()
@click.argument("leaving", metavar="OUT", type=options.PID)
@click.argument("coming", metavar="IN", type=options.SUSPENDED_PID)
@options.stated(SuspendOptions, but=("thaw",))
def swap(settings: Settings, leaving: int, coming: int, **given: Any) -> None:
    """Let two programs take turns on a GPU. Process OUT is suspended, and the suspended process IN
    resumes on the GPU that has become free.

    \b
    Examples:
      phos suspend 4712
      phos swap 4711 4712
      phos swap 4712 4711                 and back again

    If IN cannot come back, OUT does.
    """
    wanted = {name: value for name, value in given.items() if value is not None}
    job = watch(settings, "Swap", leaving, coming, **wanted)
    if not settings.json:
        tell_notes(settings, job)
        seconds = (job["Ended"] - job["Started"]) / 1e6
        settings.say(
            f"process {leaving} is suspended and process {coming} runs, after {seconds:.1f} s"
        )
