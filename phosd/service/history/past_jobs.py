"""Make a job that has ended from what the history has of it: a request that is repeated with its
token is answered with it, also by a later phosd.
"""

import contextlib
import time
from typing import Any

import msgspec

from phosd import errors
from phosd.engine.image.called import Called
from phosd.engine.job.figures import Figures
from phosd.engine.job.progress import PhaseRecord, Progress
from phosd.errors import Busy, Internal, PhosError
from phosd.service.history.database import Row
from phosd.service.history.history import History
from phosd.service.jobs.job import Job, JobState, Outcome, Task

_OF_TOKEN = "select * from jobs where owner = ? and token = ? order by id desc limit 1"
_WITH_ANOTHER = "with this token it is always told so; take another one to have it done again"
_PHASES = "select * from job_phases where job = ? order by position"


def past_job(history: History, owner: int, token: str) -> Job | None:
    """Return the job that user id ``owner`` has begun with a token; None if none is known. Raises
    :class:`Busy` if it has no end in the history yet.
    """
    for row in history.recall(_OF_TOKEN, [owner, token]):
        return _job_of(row, history.recall(_PHASES, [row["id"]]))
    return None


def _job_of(row: Row, phases: list[Row]) -> Job:
    task = Task(
        *(row["operation"], row["target"], row["owner"], frozenset[str](), _over),
        mode=row["mode"] or "",
        destination=row["destination"] or "",
        token=row["token"],
        scheduled=bool(row["scheduled"]),
        executable=row["executable"] or "",
        process=row["process"] or "",
        called=Called(row["name"] or "", row["within"] or ""),
    )
    job = Job(row["id"], task, row["started"], _progress_of(row, phases))
    job.ended = row["started"] if row["ended"] is None else row["ended"]
    job.outcome = Outcome(
        row["result"] or "", row["mode"] or "", row["why"] or "", made_of=row["made_of"] or ""
    )
    job.state, job.error = _end_of(row)
    job.over.set()
    return job


def _end_of(row: Row) -> tuple[JobState, PhosError | None]:
    """Return how a job has ended. One that a phosd did not survive has failed."""
    state = row["state"]
    if state in (JobState.QUEUED, JobState.RUNNING):
        raise Busy(
            f"what has come of job {row['id']} is not in the history yet",
            hint="try again in a moment; phosd's log says if the history cannot be written",
        )
    if state == JobState.DONE:
        return JobState.DONE, None
    if state in (JobState.FAILED, JobState.CANCELLED):
        error = errors.named(row["error"], row["message"], reason=row["reason"] or "")
        return JobState(state), error
    message = row["message"] or "phosd ended while the job ran"
    return JobState.FAILED, Internal(message, hint=_WITH_ANOTHER)


def _progress_of(row: Row, phases: list[Row]) -> Progress:
    progress = Progress()
    with contextlib.suppress(msgspec.DecodeError):  # of another version
        progress.figures = msgspec.json.decode(row["details"] or "{}", type=Figures)
    progress.notes = row["notes"].split("\n") if row["notes"] else []
    progress.wrong_guesses = row["wrong_guesses"] or 0
    # The history has seconds since the epoch; phases have monotonic times.
    offset = time.monotonic() - time.time()
    progress.phases = [
        PhaseRecord(
            phase["name"],
            phase["start"] + offset,
            bool(phase["stopped"]),
            (phase["start"] if phase["end"] is None else phase["end"]) + offset,
            phase["bytes"],
        )
        for phase in phases
    ]
    return progress


def _over(_: Progress) -> Any:
    raise AssertionError("a job that has ended is not run again")
