"""Implement ``phos jobs``: list, show and cancel jobs."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import click

from phosd.cli import client, options
from phosd.cli.client import if_missing, objects, properties
from phosd.cli.command import command
from phosd.cli.commands.migrate import gpus
from phosd.cli.job import describe
from phosd.cli.settings import Settings
from phosd.client.daemon import Properties, job_path
from phosd.client.text import WITHIN, figure, human_bytes, rate
from phosd.client.times import local_time, time_text
from phosd.client.users import of_yours
from phosd.interface.methods import JOB


@command()
@click.argument("job", type=options.JOB, required=False)
@click.option("--cancel", type=options.JOB, metavar="JOB", help="Cancel a job.")
def jobs(settings: Settings, job: int | None, cancel: int | None) -> None:
    """List the jobs, show one, or cancel one. Jobs that run or ended lately are listed; `phos
    history` has the others.

    STOP is how long the program stood still, DRAIN how fast its device memory was saved.

    \b
    Examples:
      phos jobs
      phos jobs 12             phases, why this mode, wrong guesses
      phos jobs --cancel 12
    """
    if cancel is not None:
        _cancel(settings, cancel)
        return
    if job is not None:
        with _if_unknown(job):
            found = properties(settings, job_path(job), JOB)
        _show(settings, _row(found))
        return
    rows = [_row(found) for found in objects(settings, JOB, "ListJobs")]
    settings.rows(
        sorted(rows, key=lambda row: int(row["job"])),
        {
            "JOB": lambda row: str(row["job"]),
            "OPERATION": lambda row: row["operation"],
            "TARGET": lambda row: row["target"],
            **called(rows),
            "STATE": state,
            "PHASE": lambda row: row["phase"],
            "DONE": lambda row: "" if row["progress"] is None else f"{row['progress']:.0%}",
            "MODE": mode,
            "STOP": lambda row: seconds(row["stop_seconds"]),
            "DRAIN": lambda row: rate(row["drain_rate"]),
            "RESULT": lambda row: row["message"] or row["error"] or outcome(row),
        },
        spare=("DRAIN", "MODE", "DONE", WITHIN, "STOP", "PHASE", "OPERATION"),
        cut=True,
        empty=f"no job{of_yours()} runs or ended lately; `phos history` lists those of before",
    )


def state(row: dict[str, Any]) -> str:
    """Format a job's state: ``running``, or ``queued, place 3`` while it waits."""
    place = f", place {row['position']}" if row["position"] else ""
    return f"{row['state']}{place}"


def called(rows: Sequence[Mapping[str, Any]]) -> dict[str, Callable[[dict[str, Any]], str]]:
    """Return the columns that say what programs are called, where one of the rows has it."""
    columns = {"NAME": "name", WITHIN: "within"}
    return {
        heading: partial(_text, key)
        for heading, key in columns.items()
        if any(row.get(key) for row in rows)
    }


def _text(key: str, row: Mapping[str, Any]) -> str:
    return row.get(key) or ""


def mode(row: dict[str, Any]) -> str:
    """Format how a job worked; there is one way of restoring."""
    found = row.get("mode") or ""
    return "" if found == "eager" else found


def outcome(row: dict[str, Any]) -> str:
    """Format a job's result: an image, a pid, a place, or the GPUs that a program is on now."""
    found = row.get("result") or ""
    return gpus(found) if found and row["operation"] in ("migrate", "resume") else found


def seconds(value: float | None) -> str:
    """Format seconds as ``0.52 s``; an empty string for None or 0."""
    return f"{value:.2f} s" if value else ""


def _show(settings: Settings, row: dict[str, Any]) -> None:
    """Show one job: its facts, one per line, and its phases."""
    if settings.json:
        settings.emit(row)
        return
    drained = f"{human_bytes(row['drained_bytes'])} at {rate(row['drain_rate'])}"
    settings.facts(
        {
            "job": f"{row['job']}: {row['operation']} {row['target']}",
            "program": " in ".join(filter(None, (row["name"], row["within"]))),
            "state": state(row) + (", by a schedule" if row["scheduled"] else ""),
            "started": local_time(row["started"]),
            "ended": local_time(row["ended"]),
            "mode": ": ".join(filter(None, (mode(row), row["why"]))),
            "destination": row["destination"],
            "stopped": seconds(row["stop_seconds"]),
            "drained": drained if row["drained_bytes"] else "",
            "wrong guesses": str(row["wrong_guesses"] or ""),
            "suspects": ", ".join(row["suspects"]),
            "result": outcome(row),
            "error": row["message"],
        }
    )
    for name, value in row["details"].items():
        settings.facts({"figure": figure(name, value)})
    chosen = f"mode {row['mode']}: {row['why']}"  # is told above
    for note in row["notes"]:
        settings.facts({"note": "" if note == chosen else note})
    settings.rows(
        row["phases"],
        {
            "PHASE": lambda phase: phase["name"],
            "SECONDS": lambda phase: f"{phase['seconds']:.3f}",
            "BYTES": lambda phase: human_bytes(phase["bytes_done"]) if phase["bytes_done"] else "",
            "PROGRAM": lambda phase: "stopped" if phase["stopped"] else "",
        },
    )


def _cancel(settings: Settings, number: int) -> None:
    with _if_unknown(number):
        client.cancel(settings, job_path(number))
    if settings.json:
        settings.emit({"job": number, "cancelling": True})
    else:
        settings.say(f"job {number} is being cancelled")


def _if_unknown(number: int) -> AbstractContextManager[None]:
    return if_missing(
        "NoSuchJob",
        f"phosd knows no job {number}; `phos jobs` lists those that it knows, and "
        "`phos history` those of before",
    )


def _row(job: Properties) -> dict[str, Any]:
    return describe(job) | {
        "owner": job["Owner"],
        "started": time_text(job["Started"]),
        "ended": time_text(job["Ended"]) if job["Ended"] else None,
        "error": job["Error"] or None,
        "reason": job.get("ErrorReason") or None,
        "message": job.get("Message", ""),
    }
