"""Show the running and recent jobs, and details of one."""

from textual.app import ComposeResult

from phosd.client.records import Image, Job, Process
from phosd.client.text import WITHIN
from phosd.tui.actions import Action, bindings
from phosd.tui.names import target_name
from phosd.tui.node import Contact, Node
from phosd.tui.screens.base import NodeScreen
from phosd.tui.screens.page import PageScreen
from phosd.tui.text import plain, rate, seconds, since
from phosd.tui.widgets.job import job_page, progress_text, result_cell, state_cell
from phosd.tui.widgets.listing import UNKNOWN, Listing
from phosd.tui.widgets.table import Column, RecordTable


class JobsScreen(NodeScreen):
    """The jobs that run or ended lately, newest first."""

    SCOPE = "jobs"
    TITLE_TEXT = "Jobs"
    SHOWS = frozenset({Job, Process, Image})
    BINDINGS = bindings("jobs")

    def body(self) -> ComposeResult:
        columns: list[Column[Job]] = [
            Column("NAME", 12, self._called, self._called, grow=16),
            Column("JOB", 6, lambda j: str(j.number), lambda j: j.number, right=True),
            Column("OPERATION", 11, lambda j: plain(j.operation), lambda j: j.operation),
            Column("TARGET", 8, lambda j: plain(j.target), lambda j: j.target, rank=8, grow=14),
            Column(WITHIN, 16, lambda j: plain(j.within), lambda j: j.within, rank=5, grow=20,
                   sparse=True),
            Column("STATE", 11, state_cell, lambda j: j.state),
            Column("PHASE", 9, lambda j: plain(j.phase), lambda j: j.phase, rank=5),
            Column("PROGRESS", 11, progress_text, lambda j: j.progress or 0.0, rank=3),
            Column("RATE", 11, lambda j: "" if j.over else rate(j.rate), lambda j: j.rate,
                   right=True, rank=7),
            Column("STOP", 8, lambda j: seconds(j.stop_seconds) if j.stop_seconds else "",
                   lambda j: j.stop_seconds, right=True, rank=2),
            Column("AGE", 7, lambda j: since(j.started, self.node.now()),
                   lambda j: -(j.started or 0), right=True, rank=4),
            Column("MODE", 10, lambda j: plain(j.mode), lambda j: j.mode, rank=6),
            Column("RESULT", 0, result_cell, lambda j: j.result),
        ]  # fmt: skip
        yield Listing(RecordTable(columns, sort=1, descending=True), UNKNOWN)

    def _called(self, job: Job) -> str:
        return target_name(job, self.node) or plain(job.target)

    @property
    def table(self) -> RecordTable[Job]:
        """The table of jobs."""
        return self.query_one(RecordTable)

    def show(self, node: Node) -> None:
        listing = self.query_one(Listing)
        listing.say("no jobs yet; `c` on a process begins one" if node.heard else UNKNOWN)
        listing.show_records(node.of(Job))

    def tick(self) -> None:
        super().tick()
        self.table.refresh()

    def cannot(self, action: Action) -> str:
        if not self.table.chosen:
            return "there is no job"
        if action.id == "cancel" and not any(job.cancelable for job in self.table.chosen):
            return "it has ended"
        return ""

    def action_cancel(self) -> None:
        for job in self.table.chosen:
            if job.cancelable:
                self.ask(f"Cancel job {job.number}", self.node.ask(job, "Cancel"))

    def action_job_details(self) -> None:
        if self.table.current is not None:
            self.app.push_screen(JobScreen(self.table.current))


class JobScreen(PageScreen):
    """One job: live while it runs, its time line when it has ended."""

    SCOPE = "job"
    TITLE_TEXT = "Job"
    SHOWS = frozenset({Job, Contact})
    BINDINGS = bindings("job")

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._gone = False

    @property
    def job(self) -> Job:
        """The job as last seen."""
        return self._job

    def show(self, node: Node) -> None:
        known = node.of(Job).get(self._job.path)
        self._gone = known is None
        self._job = known or self._job
        job = self._job
        forgotten = " (phosd has forgotten it; this is how it was)" if self._gone else ""
        title = plain(f"Job {job.number}: {job.operation} of {job.target}{forgotten}")
        self.set_title(title)
        page = job_page(job, node.now(), max(20, self.size.width - 4))
        self.set_page(page)

    def tick(self) -> None:
        super().tick()
        self.show(self.node)

    def cannot(self, action: Action) -> str:
        return "" if self._job.cancelable and not self._gone else "it has ended"

    def action_cancel(self) -> None:
        self.ask(f"Cancel job {self._job.number}", self.node.ask(self._job, "Cancel"))
