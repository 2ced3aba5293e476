"""A job on the terminal: a progress bar with phase, rate and time left; or JSON lines."""

from typing import Any

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from phosd.cli.client import Properties, run_job
from phosd.cli.settings import CommandError, Settings


def watch(settings: Settings, member: str, signature: str, *args: Any) -> Properties:
    """Run a job to its end and show how it goes; its properties then.

    Raises :class:`CommandError` with the job's own error when it does not end well.
    """
    with _Display(settings) as display:
        job = run_job(settings, display.tell, display.say, member, signature, *args)
    if job["State"] != "done":
        raise CommandError(job["Error"] or "Internal", job["Message"] or f"it is {job['State']}")
    return job


def summary(job: Properties) -> str:
    """How long it took, and how much of that the program stood still."""
    seconds = (job["Ended"] - job["Started"]) / 1e6
    still = f", the program stood still for {job['StopSeconds']:.2f} s" if _stopped(job) else ""
    return f"{seconds:.1f} s{still}"


def _stopped(job: Properties) -> bool:
    return any(stopped for _, stopped, *_ in job["Phases"])


class _Display:
    """Shows one job. Phases whose size is not known have a bar that only moves."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=settings.err,
            transient=True,
            disable=settings.json or not settings.err.is_terminal,
        )
        self._bar: TaskID | None = None
        self._phase = ""

    def __enter__(self) -> "_Display":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Something besides the bar."""
        if not self._settings.json:
            self._settings.err.print(text, markup=False)

    def tell(self, job: Properties) -> None:
        """The job as it is now."""
        if self._settings.json:
            self._settings.emit(_line(job))
            return
        if job["Phase"] != self._phase:
            self._phase = job["Phase"]
            if self._bar is not None:
                self._bars.remove_task(self._bar)
            self._bar = self._bars.add_task(self._phase, total=job["BytesTotal"] or None)
        if self._bar is not None:
            self._bars.update(
                self._bar, completed=job["BytesDone"], total=job["BytesTotal"] or None
            )


def _line(job: Properties) -> dict[str, Any]:
    """A job as a line of JSON: names in lower case, phases spelled out."""
    phase_names = ("name", "stopped", "seconds", "bytes_done", "bytes_total")
    return {
        "job": job["Number"],
        "operation": job["Operation"],
        "target": job["Target"],
        "state": job["State"],
        "phase": job["Phase"],
        "progress": job["Progress"] if job["ProgressValid"] else None,
        "bytes_done": job["BytesDone"],
        "bytes_total": job["BytesTotal"],
        "rate": job["Rate"],
        "stop_seconds": job["StopSeconds"],
        "mode": job["Mode"],
        "notes": job.get("Notes", []),
        "phases": [dict(zip(phase_names, phase, strict=True)) for phase in job["Phases"]],
        "result": job["Result"],
    }
