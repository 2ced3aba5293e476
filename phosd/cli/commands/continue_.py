"""Implement ``phos continue``: let a program go on that ``phos checkpoint --hold`` holds."""

import click

from phosd.cli import options
from phosd.cli.client import call
from phosd.cli.command import command
from phosd.cli.settings import Settings


@command(name="continue")
@click.argument("pid", type=options.PID)
def continue_(settings: Settings, pid: int) -> None:
    """Let a program that is held go on. `phos checkpoint --hold` has saved and holds it.

    \b
    Example:
      phos checkpoint 4711 --hold &
      ...                           what must fit the image, such as a copy of its files
      phos continue 4711

    For a suspended process there is `phos resume`.
    """
    call(settings, "Continue", pid)
    if settings.json:
        settings.emit({"pid": pid, "held": False})
    else:
        settings.say(f"process {pid} goes on")
