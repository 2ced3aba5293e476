"""Implement ``phos events``: list events of this machine."""

from typing import Any

import click

from phosd.cli.client import call
from phosd.cli.command import command
from phosd.cli.settings import Settings
from phosd.client.times import local_time, moment, time_text


@command()
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=50,
    show_default=True,
    help="How many events, from the latest back.",
)
@click.option(
    "--severity",
    type=click.Choice(["info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Only events of at least this severity.",
)
@click.option("--since", callback=moment, metavar="2h|DATE", help="Only events since then.")
def events(settings: Settings, **filters: Any) -> None:
    """List what happened, newest first. You see what concerns you; root sees everything.

    Events are jobs that ended, wrong guesses, images that were deleted or cannot be read, pools
    that cannot be filled, sleepers that were not woken, and failures of phosd itself.

    \b
    Examples:
      phos events --severity warning --since 1d
      phos events --json | jq 'select(.kind == "wrong-guess")'
    """
    wanted = {name: value for name, value in filters.items() if value is not None}
    found = call(settings, "ListEvents", **wanted)
    settings.rows(
        [row | {"time": time_text(row["time"])} for row in found],
        {
            "TIME": lambda row: local_time(row["time"]),
            "SEVERITY": lambda row: row["severity"],
            "KIND": lambda row: row["kind"],
            "ABOUT": lambda row: row["subject"],
            "WHAT": lambda row: row["text"],
        },
        spare=("KIND", "SEVERITY", "TIME"),
        empty="nothing happened, as far as you may see, that the options let through",
    )
