"""``phos history``: what phosd did."""

import click

from phosd.bus import variants
from phosd.cli.client import call
from phosd.cli.images import time_text
from phosd.cli.settings import Settings, command


@command()
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=20,
    show_default=True,
    help="How many jobs, from the latest back.",
)
def history(settings: Settings, limit: int) -> None:
    """List past jobs, newest first: yours, or as root everybody's.

    \b
    Examples:
      phos history
      phos history --limit 1000 --json | jq 'select(.state == "failed")'
    """
    (found,) = call(settings, "ListHistory", "a{sv}", variants({"limit": limit}))
    settings.rows(
        found,
        {
            "JOB": lambda row: str(row["id"]),
            "STARTED": lambda row: time_text(int(row["started"] * 1e6)),
            "OPERATION": lambda row: row["operation"],
            "TARGET": lambda row: row["target"],
            "STATE": lambda row: row["state"],
            "STOP": lambda row: f"{row['stop_seconds']:.2f} s" if row.get("stop_seconds") else "",
            "RESULT": lambda row: row.get("message") or row.get("result", ""),
        },
    )
