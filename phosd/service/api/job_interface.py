"""Define the D-Bus interface of a job.

Times are microseconds since the epoch (0: unknown), sizes bytes, durations seconds.
"""

import time
from collections.abc import Callable
from typing import Any

from phosd.engine.job.progress import PhaseRecord
from phosd.service.api.views import microseconds
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.polkit import Action, Rights
from phosd.service.dbus.spec import Interface, Property, method, methods_of
from phosd.service.jobs.table import Job, JobState

_MOST_SUSPECTS = 100
"""Most kernels that a job names, so that no program can flood the bus with names."""


class JobMethods:
    """Handlers of a job."""

    def __init__(self, rights: Rights, cancel: Callable[[Job], None]) -> None:
        self._rights = rights
        self._cancel = cancel

    @method("Cancel", "a{sv}")
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


def job_interface(methods: JobMethods | type[JobMethods]) -> Interface:
    """Return ``org.phos.Job1``. Texts of a job may name files, so they are private to its owner."""
    return Interface(
        "org.phos.Job1",
        "A piece of long work.",
        methods_of(methods),
        (
            Property(
                "Number",
                "u",
                "Its number, which no other job of this node ever has.",
                lambda job: job.number,
                constant=True,
            ),
            Property(
                "Operation",
                "s",
                "checkpoint, restore, verify, delete, recover, migrate, suspend, resume or swap.",
                lambda job: job.task.operation,
                constant=True,
            ),
            Property(
                "Target",
                "s",
                (
                    "The pid, or the id of the image, that it is about; of a swap who leaves and "
                    "who comes."
                ),
                lambda job: job.task.target,
                private=True,
                constant=True,
            ),
            Property(
                "Owner",
                "u",
                "The user id that asked for it.",
                lambda job: job.task.owner,
                constant=True,
            ),
            Property(
                "State",
                "s",
                "queued, running, done, failed or cancelled.",
                lambda job: str(job.state),
            ),
            Property(
                "Position",
                "u",
                "Its place among the jobs that wait, from 1; 0 when it does not wait.",
                lambda job: job.position,
            ),
            Property(
                "Phase",
                "s",
                "What it does now, by the names of the protocol.",
                lambda job: current_phase(job).name,
            ),
            Property(
                "ProgramStopped", "b", "Whether the program stands still now.", _program_stopped
            ),
            Property("Progress", "d", "How much of the phase is done, 0..1.", share_done),
            Property("ProgressValid", "b", "Whether Progress says anything.", _progress_valid),
            Property(
                "BytesDone",
                "t",
                "Bytes of the phase that are done.",
                lambda job: current_phase(job).bytes_done,
            ),
            Property(
                "BytesTotal",
                "t",
                "Bytes of the phase in all; 0: not known.",
                lambda job: current_phase(job).bytes_total,
            ),
            Property(
                "Rate", "d", "Bytes a second of the phase.", lambda job: rate(current_phase(job))
            ),
            Property(
                "Started",
                "t",
                (
                    "When it began, or was asked for while it waits, in microseconds since the "
                    "epoch."
                ),
                lambda job: microseconds(job.started),
            ),
            Property(
                "Ended",
                "t",
                "When it ended, in microseconds since the epoch; 0: it has not.",
                lambda job: microseconds(job.ended),
            ),
            Property(
                "ExpectedEnd",
                "t",
                "When the phase should end, in microseconds since the epoch; 0: not known.",
                expected_end,
            ),
            Property(
                "StopSeconds",
                "d",
                "For how many seconds the program has stood still.",
                lambda job: job.progress.stop_seconds,
            ),
            Property(
                "Mode",
                "s",
                (
                    "The mode of a checkpoint or a migration, or where the memory of a suspended "
                    "process goes: as it was asked for; once done, what was used."
                ),
                lambda job: job.outcome.mode or job.task.mode,
            ),
            Property(
                "Why", "s", "Why that mode was used.", lambda job: job.outcome.why, private=True
            ),
            Property(
                "Destination",
                "s",
                "Where a process is to go, as the caller said it; empty: nowhere else.",
                lambda job: job.task.destination,
                constant=True,
            ),
            Property(
                "WrongGuesses",
                "u",
                "How often the program wrote where phosd did not expect it.",
                lambda job: job.progress.wrong_guesses,
            ),
            Property(
                "Suspects",
                "as",
                "The kernels of which one made a guess wrong.",
                _suspects,
                private=True,
            ),
            Property(
                "DrainedBytes",
                "t",
                "Bytes of device memory saved so far, of all attempts.",
                lambda job: job.drained.bytes,
            ),
            Property(
                "DrainRate",
                "d",
                "Bytes of device memory saved a second.",
                lambda job: job.drained.rate,
            ),
            Property(
                "Scheduled",
                "b",
                "Whether it is a periodic checkpoint.",
                lambda job: job.task.scheduled,
                constant=True,
            ),
            Property(
                "Details",
                "a{sd}",
                "Figures of the mode that was used, units in their names.",
                _details,
                private=True,
            ),
            Property(
                "Notes",
                "as",
                "What a reader should know.",
                lambda job: list(job.progress.notes),
                private=True,
            ),
            Property(
                "Phases",
                "a(sbdtt)",
                (
                    "Each phase: name, whether the program stood still, seconds, bytes done, "
                    "bytes in all."
                ),
                lambda job: [describe_phase(p) for p in job.progress.phases],
            ),
            Property(
                "Cancelable",
                "b",
                "Whether Cancel can still do something.",
                lambda job: not job.state.ended,
            ),
            Property(
                "Result",
                "s",
                (
                    "What it made: an image id, or the pid of a process that was restored or "
                    "swapped in; what it recovered; which GPU became which (0:1,1:0); or where "
                    "memory was put."
                ),
                lambda job: job.outcome.result or job.progress.result,
                private=True,
            ),
            Property(
                "Error",
                "s",
                "The last part of the name of the error that ended it.",
                lambda job: job.error.code if job.error else "",
            ),
            Property(
                "ErrorReason",
                "s",
                "A code for what stood in the way; empty: none.",
                lambda job: job.error.reason if job.error else "",
            ),
            Property(
                "Hint",
                "s",
                "What to do next; Message says it, too.",
                lambda job: job.error.hint if job.error else "",
                private=True,
            ),
            Property(
                "Message",
                "s",
                "What that error says.",
                lambda job: str(job.error) if job.error else "",
                private=True,
            ),
        ),
    )


def _details(job: Job) -> dict[str, float]:
    return {name: float(x) for name, x in job.progress.figures.measured().items()}


def _suspects(job: Job) -> list[str]:
    return [kernel.name for kernel in job.progress.suspects[:_MOST_SUSPECTS]]


def _program_stopped(job: Job) -> bool:
    phase = current_phase(job)
    return phase.stopped and phase.end is None


def _progress_valid(job: Job) -> bool:
    return job.state is JobState.DONE or current_phase(job).bytes_total > 0
