"""Implement ``phos migrate``: move a running program to another GPU."""

from typing import Any

import click

from phosd.cli import options
from phosd.cli.command import command
from phosd.cli.job import summary, watch
from phosd.cli.settings import Settings
from phosd.interface.move_options import MigrateOptions


@command()
@click.argument("pid", type=options.PID)
@click.option(
    "--to",
    "destination",
    required=True,
    type=options.GPU,
    metavar="GPU|OLD:NEW,...",
    help="A GPU of this node, by its number or the beginning of its UUID; for a process on several "
    "GPUs, OLD:NEW for each that it leaves.",
)
@options.stated(MigrateOptions)
def migrate(settings: Settings, pid: int, destination: str, **given: Any) -> None:
    """Move a program to another GPU. The process PID and its children keep their pids and go on;
    processes that share device memory with them move along.

    \b
    Examples:
      phos migrate 4711 --to 1
      phos migrate 4711 --to GPU-5f3a
      phos migrate 4711 --to 0:1,1:0       the two GPUs of it change places

    The new GPU must be of the same chip and have room, which is looked at before the program stops.
    Ctrl-C cancels; the program goes on in any case. `phos evacuate` clears a whole GPU.
    """
    wanted = {name: value for name, value in given.items() if value is not None}
    job = watch(settings, "Migrate", pid, destination, **wanted)
    if not settings.json:
        tell_notes(settings, job)
        settings.say(f"process {pid} is on {gpus(job['Result'])} now, after {summary(job)}")


def tell_notes(settings: Settings, job: dict[str, Any]) -> None:
    """Print the notes of the job."""
    for note in job["Notes"]:
        settings.note(note)


def gpus(result: str) -> str:
    """Format the GPUs that a process now has, e.g. ``GPU 1`` from a job's result ``0:1``."""
    new = [part.rpartition(":")[2] for part in result.split(",")]
    return f"GPU{'s' * (len(new) > 1)} {', '.join(new)}"
