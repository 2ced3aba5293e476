"""Define the events that the history records."""

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phosd.engine.job.checkpoint_history import KernelMark
from phosd.service.jobs.job import Job, JobState

_MOST_SUSPECTS = 10
"""Most kernels that an event names."""


class Severity(enum.StrEnum):
    """Severity of an event, in rising order."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def and_worse(self) -> list[str]:
        """This severity and all higher ones."""
        every = list(Severity)
        return [str(severity) for severity in every[every.index(self) :]]


@dataclass(frozen=True)
class Event:
    """Something that happened to ``subject``. ``owner`` is the user id concerned; None means the
    node, and then only administrators see the event.
    """

    kind: str
    subject: str
    text: str
    severity: Severity = Severity.INFO
    owner: int | None = None


def _result(job: Job) -> str:
    """Return a job's result in words: that of a move is ``0:1``, the GPUs before and after."""
    result = job.outcome.result
    if job.task.operation not in ("migrate", "resume"):
        return result
    return ", ".join(f"GPU {pair.replace(':', ' to GPU ')}" for pair in result.split(","))


def of_end(job: Job) -> Iterator[Event]:
    """Yield the events of a job's end: that it ended, and any wrong prediction of writes."""
    task, subject = job.task, f"job {job.number}"
    failed = job.state is JobState.FAILED
    told = f": {job.error or _result(job)}" if job.error or job.outcome.result else ""
    text = f"{task.operation} of {task.target}: {job.state}{told}"
    severity = Severity.WARNING if failed else Severity.INFO
    yield Event("job", subject, text, severity, task.owner)
    if job.progress.wrong_guesses:
        text = (
            f"process {task.target} wrote where phosd did not expect it (wrong guesses: "
            f"{job.progress.wrong_guesses}); suspects: {_named(job.progress.suspects)}"
        )
        yield Event("wrong-guess", subject, text, Severity.WARNING, task.owner)
    if job.progress.disproved:
        text = (
            "phosd's analysis of what a kernel writes is wrong, which is a bug: report it with the "
            f"module of the kernel. It is one of these: {_named(job.progress.disproved)}"
        )
        yield Event("wrong-analysis", subject, text, Severity.ERROR, task.owner)


def _named(kernels: Sequence[KernelMark]) -> str:
    more = f" and {len(kernels) - _MOST_SUSPECTS} more" * (len(kernels) > _MOST_SUSPECTS)
    return ", ".join(kernel.name for kernel in kernels[:_MOST_SUSPECTS]) + more
