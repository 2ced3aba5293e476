"""``phos jobs``: what phosd is doing."""

import asyncio
from contextlib import closing
from typing import Any

import click

from phosd.bus import ROOT, Connection
from phosd.cli.client import JOB, objects
from phosd.cli.settings import Settings, command


@command()
@click.option("--cancel", type=click.IntRange(min=1), metavar="JOB", help="Cancel a job.")
def jobs(settings: Settings, cancel: int | None) -> None:
    """List the jobs that run or ended lately; or cancel one.

    \b
    Examples:
      phos jobs
      phos jobs --cancel 12
    """
    if cancel is not None:
        asyncio.run(_cancel(settings, cancel))
        return
    rows = [_row(job) for job in objects(settings, "Job1", "ListJobs")]
    settings.rows(
        sorted(rows, key=lambda row: int(row["job"])),
        {
            "JOB": lambda row: str(row["job"]),
            "OPERATION": lambda row: row["operation"],
            "TARGET": lambda row: row["target"],
            "STATE": lambda row: row["state"],
            "PHASE": lambda row: row["phase"],
            "DONE": lambda row: "" if row["progress"] is None else f"{row['progress']:.0%}",
            "RESULT": lambda row: row["error"] or row["result"],
        },
    )


async def _cancel(settings: Settings, number: int) -> None:
    with closing(await Connection.open(settings.bus)) as connection:
        await connection.call(f"{ROOT}/job/_{number}", JOB, "Cancel", "a{sv}", {})
    if settings.json:
        settings.emit({"job": number, "cancelling": True})
    else:
        settings.out.print(f"job {number} is being cancelled")


def _row(job: dict[str, Any]) -> dict[str, Any]:
    return {
        "job": job["Number"],
        "operation": job["Operation"],
        "target": job["Target"],
        "owner": job["Owner"],
        "state": job["State"],
        "phase": job["Phase"],
        "progress": job["Progress"] if job["ProgressValid"] else None,
        "result": job["Result"],
        "error": job["Error"] or None,
        "message": job.get("Message", ""),
    }
