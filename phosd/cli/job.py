"""Show a job on the terminal: a progress bar with phase, rate and time left, or JSON lines."""

import sys
from typing import TYPE_CHECKING, Any

from phosd.cli.client import run_job
from phosd.cli.settings import Settings
from phosd.client.daemon import Properties
from phosd.client.errors import CommandError
from phosd.client.text import plain

# Bars are drawn on terminals only; scripts need not load the library.
if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID

_BESIDE = ("checkpoint", "migrate")
"""Operations during most of which the program keeps running."""


def watch(settings: Settings, member: str, /, *args: Any, **options: Any) -> Properties:
    """Run a job to its end, show its progress, and return its final properties.

    Raises :class:`CommandError` with the job's own error when it fails.
    """
    with _Display(settings) as display:
        job, ctrl_c = run_job(settings, display.tell, display.say, member, *args, **options)
    if job["State"] != "done":
        cancelled = ctrl_c and job["State"] == "cancelled"
        failure = CancelledHereError if cancelled else CommandError
        raise failure(job["Error"] or "Internal", job["Message"] or f"it is {job['State']}")
    return job


def summary(job: Properties) -> str:
    """Format the job's duration, and how long the program was stopped."""
    seconds = (job["Ended"] - job["Started"]) / 1e6
    still = f", the program stood still for {job['StopSeconds']:.2f} s" if _stopped(job) else ""
    return f"{seconds:.1f} s{still}"


def _stopped(job: Properties) -> bool:
    return any(stopped for _, stopped, *_ in job["Phases"])


class CancelledHereError(CommandError):
    """The user cancelled the job here. Other clients and the end of phosd also cancel jobs."""


class _Display:
    """The display of one job. A phase of unknown size has no bar, but a spinner."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bars = None if settings.json or not sys.stderr.isatty() else _bars(settings)
        self._bar: TaskID | None = None
        self._phase = ""

    def __enter__(self) -> "_Display":
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, text: str) -> None:
        """Print a message above the bar."""
        if not self._settings.json:
            self._settings.note(text)

    def tell(self, job: Properties) -> None:
        """Show the present state of the job."""
        if self._settings.json:
            self._settings.emit(describe(job))
        elif self._bars is not None:
            self._draw(self._bars, job)

    def _draw(self, bars: "Progress", job: Properties) -> None:
        phase, total = _headline(job), job["BytesTotal"] or None
        if phase != self._phase:
            self._phase = phase
            if self._bar is not None:
                bars.remove_task(self._bar)
            self._bar = bars.add_task(phase, total=total)
        if self._bar is not None:
            bars.update(self._bar, completed=job["BytesDone"], total=total)


def _bars(settings: Settings) -> "Progress":
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    class Known(ProgressColumn):
        """A column that is empty as long as a task has no total."""

        def __init__(self, column: ProgressColumn) -> None:
            super().__init__()
            self._column = column

        def render(self, task: Task) -> "RenderableType":
            return "" if task.total is None else self._column.render(task)

    figures = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *map(Known, (*figures, TimeRemainingColumn())),
        console=settings.err,
        transient=True,
    )


def _headline(job: Properties) -> str:
    """Return the phase and whether the program runs, highlighted if it is stopped."""
    if job["State"] == "queued":
        return f"queued at place {job['Position']}: other jobs must end first"
    from rich.markup import escape

    phase = f"{escape(plain(job['Phase'])):<10}"
    if job["ProgramStopped"]:
        return f"[bold yellow]{phase} program stopped[/]"
    return f"{phase} program running" if job["Operation"] in _BESIDE else phase


def describe(job: Properties) -> dict[str, Any]:
    """Return a job for JSON: names in lower case, phases as objects. Private properties may be
    missing.
    """
    phase_names = ("name", "stopped", "seconds", "bytes_done", "bytes_total")
    return {
        "job": job["Number"],
        "operation": job["Operation"],
        "target": job["Target"],
        "name": job.get("Name") or None,
        "within": job.get("Within") or None,
        "state": job["State"],
        "position": job["Position"] or None,
        "phase": job["Phase"],
        "progress": job["Progress"] if job["ProgressValid"] else None,
        "bytes_done": job["BytesDone"],
        "bytes_total": job["BytesTotal"],
        "rate": job["Rate"],
        "stop_seconds": job["StopSeconds"],
        "mode": job["Mode"],
        "destination": job["Destination"],
        "why": job.get("Why", ""),
        "wrong_guesses": job["WrongGuesses"],
        "suspects": job.get("Suspects", []),
        "drained_bytes": job["DrainedBytes"],
        "drain_rate": job["DrainRate"],
        "scheduled": job["Scheduled"],
        "details": job["Details"],
        "notes": job.get("Notes", []),
        "phases": [dict(zip(phase_names, phase, strict=True)) for phase in job["Phases"]],
        "result": job["Result"],
    }
