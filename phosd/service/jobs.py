"""Jobs: one piece of long work each, run in a thread, watched and cancelled from the event loop."""

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from phosd.engine.errors import (
    Busy,
    Cancelled,
    Internal,
    InvalidOption,
    PhosError,
    Unsupported,
)
from phosd.engine.progress import Progress

KEPT = 64
"""Finished jobs that stay readable."""
NOTIFY_SECONDS = 0.5
"""Least time between two notifications about the progress of one job."""

_log = logging.getLogger(__name__)


class JobState(enum.StrEnum):
    """A job runs, and ends in one of the other states."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Outcome:
    """What a finished operation tells: an image id or a pid, and the mode that was used."""

    result: str = ""
    mode: str = ""


Work = Callable[[Progress], Outcome]


@dataclass(frozen=True)
class Task:
    """What a job is to do. ``claims`` are the things that no other job may touch meanwhile."""

    operation: str
    target: str
    owner: int
    claims: frozenset[str]
    work: Work
    mode: str = ""
    token: str = ""


@dataclass
class Job:
    """One job. ``started`` and ``ended`` are seconds since the epoch."""

    number: int
    task: Task
    started: float
    progress: Progress = field(default_factory=Progress)
    state: JobState = JobState.RUNNING
    ended: float | None = None
    outcome: Outcome = Outcome()
    error: PhosError | None = None


@dataclass(frozen=True)
class Listener:
    """Whom the table tells, always on the event loop."""

    started: Callable[[Job], None]
    progressed: Callable[[Job], None]
    ended: Callable[[Job], None]
    forgotten: Callable[[Job], None]


class JobTable:
    """Every job that runs or ended lately. To be used on the event loop."""

    def __init__(self, listener: Listener, first_number: int = 1) -> None:
        self._listener = listener
        self._next = first_number
        self._jobs: dict[int, Job] = {}
        self._claims: dict[str, Job] = {}
        self._tokens: dict[tuple[int, str], Job] = {}
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(max_workers=32, thread_name_prefix="job")

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def submit(self, task: Task, prepare: Callable[[Job], None]) -> Job:
        """Start the work; ``prepare`` runs just before and may refuse.

        The same token of the same user gives the job that it gave before. Raises :class:`Busy`
        when another job holds one of the claims.
        """
        if task.token:
            known = self._tokens.get((task.owner, task.token))
            if known is not None:
                if (known.task.operation, known.task.target) != (task.operation, task.target):
                    raise InvalidOption(
                        f"the token {task.token!r} belongs to job {known.number} "
                        f"({known.task.operation} {known.task.target})",
                        hint="use another token for other work",
                    )
                return known
        self.require_free(task.claims)
        job = Job(self._next, task, time.time())
        prepare(job)
        self._next += 1
        self._jobs[job.number] = job
        self._claims |= dict.fromkeys(task.claims, job)
        if task.token:
            self._tokens[task.owner, task.token] = job
        self._listener.started(job)
        loop = asyncio.get_running_loop()
        notify = _Notifier(loop, lambda: self._listener.progressed(job))
        job.progress.observer = notify
        self._runs[job.number] = loop.create_task(self._run(job, notify))
        return job

    def require_free(self, claims: Iterable[str]) -> None:
        """Raise :class:`Busy` when a running job holds one of these."""
        for claim in claims:
            holder = self._claims.get(claim)
            if holder is not None:
                raise Busy(
                    f"job {holder.number} ({holder.task.operation} {holder.task.target}) "
                    f"holds {claim}",
                    hint="wait until it has ended, or cancel it",
                )

    def claimed(self, prefix: str) -> list[str]:
        """What running jobs hold, of one kind, e.g. ``process``."""
        return [claim for claim in self._claims if claim.startswith(prefix + " ")]

    async def wait(self, job: Job) -> None:
        """Wait until the job has ended."""
        run = self._runs.get(job.number)
        if run is not None:
            await asyncio.shield(run)

    def cancel(self, job: Job) -> None:
        """Ask the job to stop at its next safe point. Raises :class:`Unsupported` when it ended."""
        if job.state is not JobState.RUNNING:
            raise Unsupported(
                f"job {job.number} has ended already ({job.state})",
                hint="there is nothing to cancel",
            )
        job.progress.cancel()

    async def close(self) -> None:
        """Cancel what runs and wait until every program runs again."""
        for job in self._jobs.values():
            if job.state is JobState.RUNNING:
                job.progress.cancel()
        await asyncio.gather(*self._runs.values())
        self._threads.shutdown()

    async def _run(self, job: Job, notify: Callable[[Progress], None]) -> None:
        loop = asyncio.get_running_loop()
        try:
            job.outcome = await loop.run_in_executor(self._threads, job.task.work, job.progress)
            job.state = JobState.DONE
        except Cancelled as error:
            job.state, job.error = JobState.CANCELLED, error
        except PhosError as error:
            job.state, job.error = JobState.FAILED, error
        except Exception as error:
            _log.exception("job %d (%s) failed", job.number, job.task.operation)
            job.state = JobState.FAILED
            job.error = Internal(
                f"{job.task.operation} of {job.task.target} met an error that phosd did not "
                f"expect ({type(error).__name__})",
                hint="phosd's log has the details; please report them",
            )
        job.ended = time.time()
        job.progress.finish()
        for claim in job.task.claims:
            del self._claims[claim]
        del self._runs[job.number]
        notify(job.progress)
        try:
            self._listener.ended(job)
            self._forget_old()
        except OSError:  # the journal's folder; the job itself has ended
            _log.exception("the end of job %d could not be recorded", job.number)

    def _forget_old(self) -> None:
        ended = [job for job in self._jobs.values() if job.state is not JobState.RUNNING]
        for job in ended[: max(0, len(ended) - KEPT)]:
            del self._jobs[job.number]
            if job.task.token:
                del self._tokens[job.task.owner, job.task.token]
            self._listener.forgotten(job)


class _Notifier:
    """Passes on changes that a thread reports to the event loop, but not too often."""

    def __init__(self, loop: asyncio.AbstractEventLoop, notify: Callable[[], None]) -> None:
        self._loop = loop
        self._notify = notify
        self._pending = False
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        if not self._pending:
            self._pending = True
            self._loop.call_soon_threadsafe(self._schedule)

    def _schedule(self) -> None:
        wait = self._last + NOTIFY_SECONDS - self._loop.time()
        self._loop.call_later(max(0.0, wait), self._fire)

    def _fire(self) -> None:
        self._pending = False
        self._last = self._loop.time()
        self._notify()
