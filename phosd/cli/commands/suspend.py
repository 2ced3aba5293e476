"""Implement ``phos suspend``: take a program off its GPUs."""

from typing import Any

import click

from phosd.cli import options
from phosd.cli.command import command
from phosd.cli.commands.migrate import tell_notes
from phosd.cli.job import watch
from phosd.cli.settings import Settings
from phosd.interface.move_options import SleepOptions

PLACES = {"memory": "in host memory", "disk": "on disk"}


@command()
@click.argument("pid", type=options.PID)
@options.stated(SleepOptions, but=("thaw",))
def suspend(settings: Settings, pid: int, **given: Any) -> None:
    """Take a program off its GPUs for a while. Its children, and all that share device memory with
    it, go along. It stands still, and keeps its pid and its host memory.

    \b
    Examples:
      phos suspend 4711
      phos suspend 4711 --where disk      not in host memory
      phos suspend 4711 --hollow          its contexts stay there: it is back sooner
      phos suspend chat --wake            until somebody connects to it
      phos suspend chat --idle 5min       and again whenever it has computed nothing for so long
      phos resume 4711                    and it goes on

    A suspended process survives a restart of phosd, but not a reboot: for that, make an image
    (`phos checkpoint`).
    """
    wanted = {name: value for name, value in given.items() if value is not None}
    job = watch(settings, "Suspend", pid, **wanted)
    if not settings.json:
        tell_notes(settings, job)
        seconds = (job["Ended"] - job["Started"]) / 1e6
        place = PLACES.get(job["Result"], job["Result"])
        sleeps = given.get("wake") or given.get("idle")
        contexts = ", and its contexts stay on its GPUs" if given.get("hollow") or sleeps else ""
        back = ", or whoever connects to it," if sleeps else ""
        settings.say(
            f"process {pid} is suspended, after {seconds:.1f} s; its device memory is {place}"
            f"{contexts}; `phos resume {pid}`{back} brings it back"
        )
