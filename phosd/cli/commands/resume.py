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
      phos resume 4711 --ready            all but its run: then that begins at once
    """
    wanted = {name: value for name, value in given.items() if value}
    job = watch(settings, "Resume", pid, **wanted)
    if not settings.json:
        tell_notes(settings, job)
        seconds = (job["Ended"] - job["Started"]) / 1e6
        where = gpus(job["Result"])
        if given.get("hollow"):
            settings.say(
                f"the contexts of process {pid} are on {where}, after {seconds:.1f} s; "
                f"`phos resume {pid}` brings its memory back, too"
            )
            return
        if given.get("ready"):
            settings.say(
                f"process {pid} is ready on {where}, after {seconds:.1f} s; `phos resume {pid}` "
                "lets it run"
            )
            return
        settings.say(f"process {pid} runs on {where} again, after {seconds:.1f} s")
