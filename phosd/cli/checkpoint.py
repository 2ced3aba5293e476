"""``phos checkpoint``: save a running program."""

import click

from phosd.bus import variants
from phosd.cli.job import summary, watch
from phosd.cli.settings import Settings, command


@command()
@click.argument("pid", type=click.IntRange(min=1))
@click.option(
    "--mode",
    type=click.Choice(["auto", "stop", "driver"]),
    default="auto",
    show_default=True,
    help="stop: phosd saves the device memory; driver: the CUDA driver does, slower, "
    "and works for programs that were not started with `phos run`.",
)
@click.option(
    "--tcp",
    type=click.Choice(["refuse", "close"]),
    default="refuse",
    show_default=True,
    help="What becomes of connected TCP sockets: refuse to save the program, or close them "
    "when it is restored.",
)
def checkpoint(settings: Settings, pid: int, mode: str, tcp: str) -> None:
    """Save process PID and its children as an image, and let it go on.

    \b
    Examples:
      phos checkpoint 4711
      phos checkpoint 4711 --mode driver
      phos checkpoint 4711 --json | jq -r 'select(.state == "done").result'

    Ctrl-C cancels; the program goes on in any case.
    """
    options = variants({"mode": mode, "tcp": tcp})
    job = watch(settings, "Checkpoint", "ua{sv}", pid, options)
    if not settings.json:
        for note in job["Notes"]:
            settings.err.print(note, markup=False)
        settings.err.print(f"saved in {summary(job)} (mode {job['Mode']})")
        settings.out.print(job["Result"])
