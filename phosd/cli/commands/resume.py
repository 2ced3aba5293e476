"""Implement ``phos resume``: bring a suspended program back to a GPU."""

from typing import Any

import click

from phosd.cli import options
from phosd.cli.command import command
from phosd.cli.commands.migrate import gpus, tell_notes
from phosd.cli.job import watch
from phosd.cli.settings import Settings
from phosd.interface.move_options import ResumeOptions


@command()
@click.argument("pid", type=options.SUSPENDED_PID)
@click.option(
    "--gpu",
    default="",
    type=options.GPU,
    metavar="GPU|OLD:NEW,...",
    help="The GPU to resume on, written as for `phos migrate --to` (default: where it was).",
)
@options.stated(ResumeOptions, but=("gpu",))
def resume(settings: Settings, pid: int, **given: Any) -> None:
    """Bring a suspended program back. The process PID, and all that was suspended with it, go on
    where they were stopped.

    \b
    Examples:
      phos resume 4711
      phos resume 4711 --gpu 1            on another GPU of the same chip
      phos resume 4711 --hollow           its contexts alone: then the rest takes less time
    """
    wanted = {name: value for name, value in given.items() if value}
    job = watch(settings, "Resume", pid, **wanted)
    if not settings.json:
        tell_notes(settings, job)
        seconds = (job["Ended"] - job["Started"]) / 1e6
        if given.get("hollow"):
            settings.say(
                f"the contexts of process {pid} are on {gpus(job['Result'])}, after "
                f"{seconds:.1f} s; `phos resume {pid}` brings its memory back, too"
            )
            return
        settings.say(f"process {pid} runs on {gpus(job['Result'])} again, after {seconds:.1f} s")
