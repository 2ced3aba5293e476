"""Report the start, progress and end of jobs to the journal, the history and the bus."""

from collections.abc import Awaitable, Callable

import msgspec

from phosd.bus import ROOT
from phosd.engine.job.affected import AffectedSet
from phosd.engine.job.journal import JobRecord, Journal
from phosd.engine.system.procfs import boot_id
from phosd.service.api.views import job_path
from phosd.service.dbus.object_tree import ObjectTree
from phosd.service.dbus.spec import Served
from phosd.service.history import events
from phosd.service.history.history import History
from phosd.service.history.past_jobs import past_job
from phosd.service.jobs.listener import Listener
from phosd.service.jobs.table import Job
from phosd.service.process_identity import Target


class JobReports:
    """Reports jobs through the listener of the job table. ``served`` is the D-Bus interface of
    jobs; ``concluding`` is awaited before a job has ended, ``after`` called when it has. Use it on
    the event loop only.
    """

    def __init__(
        self,
        journal: Journal,
        history: History,
        tree: ObjectTree,
        served: Served,
        concluding: Callable[[Job], Awaitable[None]],
        after: Callable[[Job], None],
    ) -> None:
        self._journal = journal
        self._history = history
        self._tree = tree
        self._served = served
        self._concluding = concluding
        self._after = after

    def listener(self) -> Listener:
        """Return the callbacks for the job table."""
        return Listener(
            started=self._started,
            moved=self._moved,
            progressed=self._progressed,
            concluding=self._concluding,
            ended=self._ended,
            recall=self._recall,
            forgotten=self._forgotten,
        )

    def write_down(self, job: Job, target: Target | None = None) -> None:
        """Write the journal record of a job that begins, with the process that it works on."""
        record = JobRecord(
            job=job.number,
            operation=job.task.operation,
            target=job.task.target,
            owner=job.task.owner,
            started=job.started,
            boot_id=boot_id(),
            pid=target.pid if target else None,
            start_time=target.start_time if target else None,
            token=job.task.token,
        )
        self._journal.write(record)

        def write(affected: AffectedSet) -> None:
            self._journal.write(msgspec.structs.replace(record, affected=affected))

        job.progress.recorder = write

    def _started(self, job: Job) -> None:
        self._history.job(job)
        self._tree.publish(job_path(job), self._served, job, job.task.owner)
        self._tree.signal(ROOT, "JobNew", job_path(job))

    def _moved(self, job: Job) -> None:
        """Report a job that begins after waiting, or waits again."""
        self._history.job(job)
        assert job.progress.observer is not None
        job.progress.observer(job.progress)  # signals the change, at a limited rate

    def _progressed(self, job: Job) -> None:
        self._tree.changed(job_path(job))

    def _ended(self, job: Job) -> None:
        self._history.job(job)
        for event in events.of_end(job):
            self._history.event(event)
        if job.task.token:  # whoever repeats it is to be told how the job has ended
            self._history.then(lambda: self._journal.remove(job.number))
        else:
            self._journal.remove(job.number)
        self._after(job)

    def _recall(self, owner: int, token: str) -> Job | None:
        job = past_job(self._history, owner, token)
        if job is not None:
            self._tree.publish(job_path(job), self._served, job, owner)
        return job

    def _forgotten(self, job: Job) -> None:
        self._tree.withdraw(job_path(job))
