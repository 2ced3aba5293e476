"""Read the properties of a job, which :mod:`phosd.interface` describes, and cancel it."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from phosd.engine.job.progress import PhaseRecord
from phosd.service.api.views import microseconds
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.polkit import Action, Rights
from phosd.service.dbus.spec import method
from phosd.service.jobs.table import Job, JobState

_MOST_SUSPECTS = 100
"""Most kernels that a job names, so that no program can flood the bus with names."""


class JobMethods:
    """Handlers of a job."""

    def __init__(self, rights: Rights, cancel: Callable[[Job], None]) -> None:
        self._rights = rights
        self._cancel = cancel

    @method("Cancel")
    async def cancel(self, caller: Caller, job: Job) -> None:
        """Stop at the next safe point; the program runs on."""
        number = job.number
        await self._rights.require(
            caller, Action.CANCEL, job.task.owner, f"job {number}", job=str(number)
        )
        self._cancel(job)


def current_phase(job: Job) -> PhaseRecord:
    """Return the phase that the job is in, or was in when it ended."""
    phases = job.progress.phases
    return phases[-1] if phases else PhaseRecord("", time.monotonic(), stopped=False)


def rate(phase: PhaseRecord) -> float:
    """Return the bytes per second of a phase so far."""
    seconds = (phase.end or time.monotonic()) - phase.start
    return phase.bytes_done / seconds if seconds > 0 else 0.0


def share_done(job: Job) -> float:
    """Return the fraction of the current phase that is done, 0..1."""
    if job.state is JobState.DONE:
        return 1.0
    phase = current_phase(job)
    return min(1.0, phase.bytes_done / phase.bytes_total) if phase.bytes_total else 0.0


def expected_end(job: Job) -> int:
    """Return when the current phase should end, extrapolated from its rate."""
    phase = current_phase(job)
    speed = rate(phase)
    if job.ended is not None or not phase.bytes_total or not speed:
        return microseconds(job.ended)
    left = max(0, phase.bytes_total - phase.bytes_done)
    return microseconds(time.time() + left / speed)


def describe_phase(phase: PhaseRecord) -> list[Any]:
    seconds = (phase.end or time.monotonic()) - phase.start
    return [phase.name, phase.stopped, seconds, phase.bytes_done, phase.bytes_total]


def _details(job: Job) -> dict[str, float]:
    return {name: float(x) for name, x in job.progress.figures.measured().items()}


def _suspects(job: Job) -> list[str]:
    return [kernel.name for kernel in job.progress.suspects[:_MOST_SUSPECTS]]


def _program_stopped(job: Job) -> bool:
    phase = current_phase(job)
    return phase.stopped and phase.end is None


def _progress_valid(job: Job) -> bool:
    return job.state is JobState.DONE or current_phase(job).bytes_total > 0


JOB_READERS: Mapping[str, Callable[[Job], object]] = {
    "Number": lambda job: job.number,
    "Operation": lambda job: job.task.operation,
    "Target": lambda job: job.task.target,
    "Name": lambda job: job.called.name,
    "Within": lambda job: job.called.within,
    "Owner": lambda job: job.task.owner,
    "State": lambda job: str(job.state),
    "Position": lambda job: job.position,
    "Phase": lambda job: current_phase(job).name,
    "ProgramStopped": _program_stopped,
    "Progress": share_done,
    "ProgressValid": _progress_valid,
    "BytesDone": lambda job: current_phase(job).bytes_done,
    "BytesTotal": lambda job: current_phase(job).bytes_total,
    "Rate": lambda job: rate(current_phase(job)),
    "Started": lambda job: microseconds(job.started),
    "Ended": lambda job: microseconds(job.ended),
    "ExpectedEnd": expected_end,
    "StopSeconds": lambda job: job.progress.stop_seconds,
    "Mode": lambda job: job.outcome.mode or job.task.mode,
    "Why": lambda job: job.outcome.why,
    "Destination": lambda job: job.task.destination,
    "WrongGuesses": lambda job: job.progress.wrong_guesses,
    "Suspects": _suspects,
    "DrainedBytes": lambda job: job.drained.bytes,
    "DrainRate": lambda job: job.drained.rate,
    "Scheduled": lambda job: job.task.scheduled,
    "Details": _details,
    "Notes": lambda job: list(job.progress.notes),
    "Phases": lambda job: [describe_phase(p) for p in job.progress.phases],
    "Cancelable": lambda job: not job.state.ended,
    "Result": lambda job: job.outcome.result or job.progress.result,
    "Error": lambda job: job.error.code if job.error else "",
    "ErrorReason": lambda job: job.error.reason if job.error else "",
    "Hint": lambda job: job.error.hint if job.error else "",
    "Message": lambda job: str(job.error) if job.error else "",
}
