"""Implement ``phos history``: list past jobs."""

from typing import Any

import click

from phosd.cli import options
from phosd.cli.client import call
from phosd.cli.command import command
from phosd.cli.commands.jobs import called, mode, outcome, seconds
from phosd.cli.settings import Settings
from phosd.client.rows import first_page, next_page, unpacked
from phosd.client.text import WITHIN, rate
from phosd.client.times import local_time, moment, time_text
from phosd.client.users import of_yours

_OPERATIONS = (
    *("checkpoint", "restore", "verify", "delete", "recover", "export", "import"),
    *("migrate", "suspend", "resume", "swap", "start"),
)
_STATES = ("queued", "running", "done", "failed", "cancelled", "interrupted")


@command()
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=20,
    show_default=True,
    help="How many jobs, from the latest back.",
)
@click.option("--pid", type=options.PID, help="Only jobs of this process.")
@click.option("--operation", type=click.Choice(_OPERATIONS), help="Only jobs of this kind.")
@click.option("--state", type=click.Choice(_STATES), help="Only jobs in this state.")
@click.option(
    "--since", callback=moment, metavar="2h|DATE", help="Only jobs that began then or later."
)
@click.option(
    "--until", callback=moment, metavar="2h|DATE", help="Only jobs that began then or before."
)
def history(settings: Settings, **filters: Any) -> None:
    """List past jobs, newest first. You see yours; root sees everybody's.

    STOP is how long the program stood still, DRAIN how fast its device memory was saved, WRONG how
    often the program wrote where phosd did not expect it. MODE is how a checkpoint or a migration
    was made, or where the memory of a suspended program went; auto if it ended before that was
    chosen. Below a result is why a checkpoint was not made in mode concurrent.

    \b
    Examples:
      phos history
      phos history --pid 4711 --since 2h
      phos history --state failed --since yesterday --limit 1000 --json
    """
    wanted = {name: value for name, value in filters.items() if value is not None}
    rows: list[dict[str, Any]] = []
    page: dict[str, Any] | None = first_page(wanted)
    while page is not None:
        found = call(settings, "ListHistory", **page)
        rows += found
        page = next_page(page, found, wanted["limit"] - len(rows))
    settings.rows(
        [row | unpacked(row) for row in rows],
        {
            "JOB": lambda row: str(row["id"]),
            "STARTED": lambda row: local_time(time_text(int(row["started"] * 1e6))),
            "OPERATION": lambda row: row["operation"],
            "TARGET": lambda row: row["target"],
            **called(rows),
            "STATE": lambda row: row["state"],
            "MODE": mode,
            "STOP": lambda row: seconds(row.get("stop_seconds")),
            "DRAIN": lambda row: rate(row.get("drain_rate")),
            "WRONG": lambda row: str(row.get("wrong_guesses") or ""),
            "RESULT": lambda row: (row.get("message") or outcome(row), _because(row)),
        },
        spare=("WRONG", "DRAIN", "MODE", WITHIN, "STOP", "STARTED", "OPERATION"),
        empty=f"there is no such job{of_yours()} in the history"
        if len(wanted) > 1
        else f"there was no job{of_yours()} yet; `phos checkpoint PID` would be one",
    )


def _because(row: dict[str, Any]) -> str:
    """Return why a mode was used, unless it is the usual one."""
    return f"  ({row['why']})" if row.get("why") and row.get("mode") != "concurrent" else ""
