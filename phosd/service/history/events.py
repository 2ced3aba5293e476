"""What happened that somebody may want to know of later."""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from phosd.service.jobs.job import Job, JobState

_MOST_SUSPECTS = 10
"""Kernels that an event names."""


class Severity(enum.StrEnum):
    """How much it matters, in rising order."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def and_worse(self) -> list[str]:
        """This one and those that matter more."""
        every = list(Severity)
        return [str(severity) for severity in every[every.index(self) :]]


@dataclass(frozen=True)
class Event:
    """Something that happened to ``subject``. It concerns the user id ``owner``; without one the
    node, which is for administrators.
    """

    kind: str
    subject: str
    text: str
    severity: Severity = Severity.INFO
    owner: int | None = None


def of_end(job: Job) -> Iterator[Event]:
    """That a job has ended, and what it found out about its program."""
    task, subject = job.task, f"job {job.number}"
    failed = job.state is JobState.FAILED
    told = f": {job.error or job.outcome.result}" if job.error or job.outcome.result else ""
    text = f"{task.operation} of {task.target}: {job.state}{told}"
    severity = Severity.WARNING if failed else Severity.INFO
    yield Event("job", subject, text, severity, task.owner)
    if job.progress.wrong_guesses:
        suspects = [kernel.name for kernel in job.progress.suspects]
        named = ", ".join(suspects[:_MOST_SUSPECTS])
        more = f" and {len(suspects) - _MOST_SUSPECTS} more" * (len(suspects) > _MOST_SUSPECTS)
        text = (
            f"process {task.target} wrote where phosd did not expect it (wrong guesses: "
            f"{job.progress.wrong_guesses}); suspects: {named}{more}"
        )
        yield Event("wrong-guess", subject, text, Severity.WARNING, task.owner)
