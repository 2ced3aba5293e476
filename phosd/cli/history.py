"""``phos history``: what phosd did."""

import json
from typing import Any

import click

from phosd.bus import variants
from phosd.cli.client import call
from phosd.cli.images import time_text
from phosd.cli.jobs import rate, seconds
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

    STOP is how long the program stood still, DRAIN how fast its device memory was saved, WRONG how
    often the program wrote where nobody expected it. Below a result is why its mode was used.

    \b
    Examples:
      phos history
      phos history --limit 1000 --json | jq 'select(.state == "failed")'
    """
    (found,) = call(settings, "ListHistory", "a{sv}", variants({"limit": limit}))
    settings.rows(
        [row | {"details": json.loads(row.get("details") or "{}")} for row in found],
        {
            "JOB": lambda row: str(row["id"]),
            "STARTED": lambda row: time_text(int(row["started"] * 1e6)),
            "OPERATION": lambda row: row["operation"],
            "TARGET": lambda row: row["target"],
            "STATE": lambda row: row["state"],
            "MODE": lambda row: row.get("mode", ""),
            "STOP": lambda row: seconds(row.get("stop_seconds")),
            "DRAIN": lambda row: rate(row.get("drain_rate")),
            "WRONG": lambda row: str(row.get("wrong_guesses") or ""),
            "RESULT": lambda row: (row.get("message") or row.get("result", "")) + _because(row),
        },
    )


def _because(row: dict[str, Any]) -> str:
    return f"\n  ({row['why']})" if row.get("why") else ""
