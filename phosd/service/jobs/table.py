"""Run jobs in threads; queue, watch and cancel them from the event loop."""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from phosd.engine.operations.permissions import ROOT
from phosd.errors import Busy, Cancelled, Internal, InvalidOption, PhosError, Reason, Unsupported
from phosd.service.jobs import job_log
from phosd.service.jobs.job import DrainFigures, Job, JobState, Outcome, Task
from phosd.service.jobs.limits import MOST_JOBS, JobLimits, in_turn
from phosd.service.jobs.listener import Listener, Notifier
from phosd.units import counted

__all__ = ["DrainFigures", "Job", "JobState", "JobTable", "Listener", "Outcome", "Task"]

KEPT = 64
"""Finished jobs that stay in the table."""
RECALLED = 8
"""Jobs of one user that are there again, since their tokens were."""
WAITING = 16
"""Most waiting jobs of one user."""
IDLE = 8
"""Jobs of one user that may only wait, for Continue or for a file system, before no more of theirs
begin.
"""

_log = logging.getLogger(__name__)


class _NoSlot(Busy):
    """All slots are taken. The next job waits even if the request does not queue."""


class _NoShare(Busy):
    """The user has as many of the slots as one may have. Such a job keeps no GPU from others."""


class JobTable:
    """Every job that runs or ended lately. Use it on the event loop only, but for
    :meth:`snapshot`.
    """

    def __init__(
        self, listener: Listener, first_number: int = 1, limits: JobLimits | None = None
    ) -> None:
        self._listener = listener
        self._limits = limits or JobLimits()
        self._next = first_number
        self._jobs: dict[int, Job] = {}
        self._claims: dict[str, Job] = {}
        self._tokens: dict[tuple[int, str], Job] = {}
        self._recalled: list[Job] = []
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._waiting: dict[int, Callable[[Job], None]] = {}
        self._reserved: frozenset[int] = frozenset()
        self._ended = 0
        self._closing = False
        self._threads = ThreadPoolExecutor(max_workers=2 * MOST_JOBS, thread_name_prefix="job")

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def snapshot(self) -> tuple[Job, ...]:
        """Return all jobs. Other threads may call it, too."""
        return tuple(self._jobs.values())

    def numbered(self, number: int) -> Job | None:
        """Return the job of this number; None if there is none, or it ended too long ago."""
        past = (job for job in self._recalled if job.number == number)
        return self._jobs.get(number) or next(past, None)

    def submit(self, task: Task, prepare: Callable[[Job], None]) -> Job:
        """Start a task as a job. ``prepare`` runs just before the work and may raise to refuse it.

        The same token of the same user returns the earlier job. When all slots are taken, the job
        waits. Raises :class:`Busy` when another job holds one of the claims and the task does not
        queue.
        """
        if task.token and (known := self._of_token(task.owner, task.token)) is not None:
            if not _is_the_same(known.task, task):
                raise InvalidOption(
                    f"the token {task.token!r} belongs to job {known.number} "
                    f"({known.task.operation} {known.task.target})",
                    hint="use another token for other work",
                )
            return known
        if self._closing:
            raise Busy("phosd is ending", hint="try again when it has started anew")
        job = Job(self._next, task, time.time())
        job.progress.observer = Notifier(asyncio.get_running_loop(), lambda: self._progressed(job))
        try:
            self._admit(job, prepare, self._reserved)
        except Busy as busy:
            if not (task.queue or isinstance(busy, _NoSlot | _NoShare)):
                raise
            self._require_place(task.owner)
            self._wait(job, prepare)
        self._next += 1
        self._jobs[job.number] = job
        if task.token:
            self._tokens[task.owner, task.token] = job
        if job.state is JobState.QUEUED:
            self._reserve()
        self._listener.started(job)
        if job.state is JobState.RUNNING:
            self._begin(job, prepare)
        return job

    def _of_token(self, owner: int, token: str) -> Job | None:
        """Return the job of a user's token, which an earlier phosd may have run; None: there is
        none.
        """
        if (known := self._tokens.get((owner, token))) is not None:
            return known
        for past in self._recalled:
            if (past.task.owner, past.task.token) == (owner, token):
                return past
        if (found := self._listener.recall(owner, token)) is not None:
            self._recalled.append(found)
            own = [past for past in self._recalled if past.task.owner == owner]
            for old in own[:-RECALLED]:
                self._recalled.remove(old)
                self._listener.forgotten(old)
        return found

    def set_limits(self, limits: JobLimits) -> None:
        """Change how many jobs may run from now on. Running jobs are left alone."""
        self._limits = limits
        self._begin_waiting()

    @property
    def running(self) -> int:
        """How many jobs are running."""
        return len(self._runs)

    @property
    def waiting(self) -> int:
        """How many jobs are waiting."""
        return len(self._waiting)

    def require_free(self, claims: Iterable[str]) -> None:
        """Raise :class:`Busy` when a running job holds one of these claims."""
        for claim in claims:
            holder = self._claims.get(claim)
            if holder is not None:
                raise Busy(
                    f"job {holder.number} ({holder.task.operation} {holder.task.target}) "
                    f"holds {claim}",
                    hint="wait until it has ended (with `queue`, phosd does), or cancel it "
                    f"(`phos jobs --cancel {holder.number}`)",
                )

    def holder(self, claim: str) -> Job | None:
        """Return the running job that holds a claim; None if it is free."""
        return self._claims.get(claim)

    def claimed(self, prefix: str) -> list[str]:
        """Return the claims of running jobs that have a prefix, e.g. ``process``."""
        return [claim for claim in self._claims if claim.startswith(prefix + " ")]

    async def wait(self, job: Job) -> None:
        """Wait until the job has ended."""
        await job.over.wait()

    async def result(self, job: Job) -> Outcome:
        """Wait until the job has ended, and return its outcome. Raises the error that it failed
        with.
        """
        await self.wait(job)
        if job.error is not None:
            raise job.error
        return job.outcome

    def cancel(self, job: Job) -> None:
        """Ask the job to stop at its next safe point. Raises :class:`Unsupported` if it has
        ended.
        """
        if job.state.ended:
            raise Unsupported(
                f"job {job.number} has ended already ({job.state})",
                hint="there is nothing to cancel",
                reason=Reason.JOB_ENDED,
            )
        job.cancelling = True
        job.progress.cancel()
        if self._waiting.pop(job.number, None) is not None:
            self._end(job, Cancelled("the job was cancelled before it began"))
            self._begin_waiting()  # the job may have reserved a GPU

    async def close(self) -> None:
        """Cancel all jobs and wait until they have ended, so that every program runs again."""
        self._closing = True
        for job in list(self._jobs.values()):
            if not job.state.ended:
                self.cancel(job)
        await asyncio.gather(*self._runs.values())
        self._threads.shutdown()

    def _admit(self, job: Job, prepare: Callable[[Job], None], reserved: frozenset[int]) -> None:
        """Take the job's claims and mark it as running. Raises :class:`Busy` when a claim or slot
        is taken; GPUs in ``reserved`` are kept for jobs further ahead in the queue.
        """
        self.require_free(job.task.claims)
        self._require_few_idle(job.task.owner)
        if not job.task.short:
            self._require_slot(job.task, reserved)
        prepare(job)
        job.begin()
        self._claims |= dict.fromkeys(job.task.claims, job)

    def _require_slot(self, task: Task, reserved: frozenset[int]) -> None:
        running = self._running()
        gpus = [job.task.gpus for job in running]
        own = [job.task.gpus for job in running if job.task.owner == task.owner != ROOT]
        if task.gpus & reserved or not self._limits.have_room(task.gpus, gpus):
            raise _NoSlot(
                f"so many jobs may run at once as run already: {len(running)}",
                hint="wait until one has ended (`phos jobs`)",
            )
        if not self._limits.have_room(task.gpus, gpus, own):
            raise _NoShare(
                f"uid {task.owner} has {counted(len(own), 'running job')}, and others may want to "
                "begin one",
                hint="wait until one has ended (`phos jobs`)",
            )

    def _running(self) -> list[Job]:
        """Return the running jobs that take up slots."""
        running = [job for job in self._jobs.values() if job.state is JobState.RUNNING]
        return [job for job in running if not (job.task.short or job.progress.idle)]

    def _require_few_idle(self, owner: int) -> None:
        """Raise :class:`Busy` if too many jobs of a user only wait: each has a thread."""
        runs = (self._jobs[number] for number in self._runs)
        idle = [job for job in runs if job.progress.idle and job.task.owner == owner]
        if len(idle) >= IDLE:
            raise Busy(
                f"{counted(len(idle), 'job')} of uid {owner} hold programs, or wait for file "
                "systems that do not answer",
                hint="let the programs go on (`phos continue`); bring the file systems back, or "
                "unmount them by force (umount -f)",
            )

    def _progressed(self, job: Job) -> None:
        self._listener.progressed(job)
        if job.progress.idle:
            self._begin_waiting()

    def _require_place(self, owner: int) -> None:
        waiting = sum(self._jobs[number].task.owner == owner for number in self._waiting)
        if waiting >= WAITING:
            raise Busy(
                f"uid {owner} has {counted(waiting, 'waiting job')} already",
                hint="wait until one has begun, or cancel one (`phos jobs --cancel`)",
            )

    def _wait(self, job: Job, prepare: Callable[[Job], None]) -> None:
        job.state = JobState.QUEUED
        self._waiting[job.number] = prepare

    def _begin(self, job: Job, prepare: Callable[[Job], None]) -> None:
        loop = asyncio.get_running_loop()
        self._runs[job.number] = loop.create_task(self._run(job, prepare, self._ended))

    def _turns(self) -> list[Job]:
        """Return the waiting jobs in the order in which they begin."""
        waiting = ((number, self._jobs[number].task.owner) for number in self._waiting)
        order = in_turn(waiting, (job.task.owner for job in self._running()))
        return [self._jobs[number] for number in order]

    def _reserve(self) -> None:
        """Number the waiting jobs, and reserve the GPUs that they wait for: a job that needs
        several GPUs would never begin if others took each as it becomes free.
        """
        reserved: set[int] = set()
        for position, job in enumerate(self._turns(), 1):
            if job.position != position:
                job.position = position
                assert job.progress.observer is not None
                job.progress.observer(job.progress)
            try:
                self.require_free(job.task.claims)
                self._require_slot(job.task, frozenset(reserved))
            except _NoSlot:
                reserved |= job.task.gpus
            except Busy:
                continue
        self._reserved = frozenset(reserved)

    def _begin_waiting(self, besides: Job | None = None) -> None:
        """Begin the waiting jobs whose claims and slots are free, in the order of :meth:`_turns`.
        Only the first of several jobs for one process begins, since it takes the claim.
        """
        reserved: frozenset[int] = frozenset()
        for job in self._turns():
            if job is besides:
                continue
            number, prepare = job.number, self._waiting[job.number]
            try:
                self._admit(job, prepare, reserved)
            except _NoSlot:
                reserved |= job.task.gpus
                continue
            except Busy:
                continue
            except PhosError as error:  # the process has ended, say
                del self._waiting[number]
                self._end(job, error)
                continue
            del self._waiting[number]
            self._listener.moved(job)
            self._begin(job, prepare)
        self._reserve()

    async def _run(self, job: Job, prepare: Callable[[Job], None], ended_before: int) -> None:
        loop = asyncio.get_running_loop()
        error: PhosError | None = None
        job_log.concerning(job)
        work = partial(contextvars.copy_context().run, job.task.work, job.progress)
        try:
            job.outcome = await loop.run_in_executor(self._threads, work)
        except PhosError as caught:
            error = caught
            job.progress.notes += caught.details
        except Exception as caught:
            _log.exception("job %d (%s) failed", job.number, job.task.operation)
            error = Internal(
                f"{job.task.operation} of {job.task.target} met an error that phosd did not "
                f"expect ({type(caught).__name__})",
                hint="phosd's log has the details; please report them",
            )
        await self._listener.concluding(job)
        for claim in job.task.claims:
            del self._claims[claim]
        del self._runs[job.number]
        others_ended = self._ended != ended_before
        if self._may_wait_again(job, error) and (self._runs or others_ended):
            job.progress.phases.clear()
            job.progress.notes.clear()
            self._wait(job, prepare)
            self._listener.moved(job)
        else:
            self._end(job, error)
            others_ended = True
        self._begin_waiting(besides=None if others_ended else job)

    def _may_wait_again(self, job: Job, error: PhosError | None) -> bool:
        """Whether a job that found its process busy may wait again. Only the engine sees that
        another job holds a process with which this one shares device memory. As long as nothing was
        stopped, waiting is safe.
        """
        return (
            job.task.queue
            and isinstance(error, Busy)
            and not any(phase.stopped for phase in job.progress.phases)
            and not job.cancelling
        )

    def _end(self, job: Job, error: PhosError | None) -> None:
        """Record the end of a job, successful or with an error, and notify the listener."""
        job.error = error
        if error is None:
            job.end(JobState.DONE)
        else:
            cancelled = isinstance(error, Cancelled)
            job.end(JobState.CANCELLED if cancelled else JobState.FAILED)
        self._ended += 1
        job.progress.finish()
        job_log.ended(job)
        assert job.progress.observer is not None
        job.progress.observer(job.progress)
        try:
            self._listener.ended(job)
            self._forget_old()
        except OSError:  # writing to the journal's folder failed; the job itself has ended
            _log.exception("the end of job %d could not be recorded", job.number)
        finally:
            job.over.set()

    def _forget_old(self) -> None:
        ended = [job for job in self._jobs.values() if job.state.ended]
        for job in ended[: max(0, len(ended) - KEPT)]:
            del self._jobs[job.number]
            if job.task.token:
                del self._tokens[job.task.owner, job.task.token]
            self._listener.forgotten(job)


def _is_the_same(known: Task, task: Task) -> bool:
    """Whether a task is the one that the token stands for. Pids may have been given anew."""
    if (known.operation, known.target) != (task.operation, task.target):
        return False
    return known.process == task.process or not (known.process and task.process)
