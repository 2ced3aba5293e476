"""Jobs: what phosd does now and did lately."""

from textual.app import ComposeResult

from phosd.tui.actions import Action, bindings
from phosd.tui.node import Node
from phosd.tui.records import Job
from phosd.tui.screens.base import NodeScreen
from phosd.tui.text import bar, plain, rate, seconds, since
from phosd.tui.widgets.listing import Listing
from phosd.tui.widgets.table import Cell, Column, RecordTable

_STATES: dict[str, Cell] = {
    "queued": ("◌ queued", "dim"),
    "running": ("▶ running", "accent"),
    "done": ("✓ done", "good"),
    "failed": ("✗ failed", "bad"),
    "cancelled": ("- cancelled", "warn"),
}


def _state(job: Job) -> Cell:
    if job.state == "running" and job.stopped:
        return ("■ stopped", "stop")
    return _STATES.get(job.state, job.state)


def _done(job: Job) -> str:
    if job.over or job.progress is None:
        return ""
    return f"{bar(job.progress, 6)} {job.progress:4.0%}"


def _result(job: Job) -> Cell:
    if job.state == "failed":
        return (plain(f"{job.error}: {job.message}"), "bad")
    return plain(job.result)


class JobsScreen(NodeScreen):
    """The jobs that run or ended lately, newest first."""

    SCOPE = "jobs"
    TITLE_TEXT = "Jobs"
    SHOWS = frozenset({Job})
    BINDINGS = bindings("jobs")

    def body(self) -> ComposeResult:
        columns: list[Column[Job]] = [
            Column("JOB", 6, lambda j: str(j.number), lambda j: j.number, right=True),
            Column("OPERATION", 11, lambda j: plain(j.operation), lambda j: j.operation),
            Column("TARGET", 10, lambda j: plain(j.target), lambda j: j.target, rank=1),
            Column("STATE", 11, _state, lambda j: j.state),
            Column("PHASE", 9, lambda j: plain(j.phase), lambda j: j.phase, rank=5),
            Column("PROGRESS", 11, _done, lambda j: j.progress or 0.0, rank=3),
            Column("RATE", 11, lambda j: "" if j.over else rate(j.rate), lambda j: j.rate,
                   right=True, rank=7),
            Column("STOP", 8, lambda j: seconds(j.stop_seconds) if j.stop_seconds else "",
                   lambda j: j.stop_seconds, right=True, rank=2),
            Column("AGE", 7, self._age, lambda j: -(j.started or 0), right=True, rank=4),
            Column("MODE", 10, lambda j: plain(j.mode), lambda j: j.mode, rank=6),
            Column("RESULT", 0, _result, lambda j: j.result),
        ]  # fmt: skip
        table = RecordTable(columns, descending=True, classes="-table")
        yield Listing(table, "no jobs yet; `c` on a process begins one")

    def _age(self, job: Job) -> str:
        return since(job.started, self.node.now())

    @property
    def _table(self) -> RecordTable[Job]:
        return self.query_one(RecordTable)

    def show(self, node: Node) -> None:
        self.query_one(Listing).show_records(node.of(Job))

    def cannot(self, action: Action) -> str:
        if not self.is_mounted or not self._table.chosen:
            return "there is no job"
        if action.id == "cancel" and not any(job.cancelable for job in self._table.chosen):
            return "it has ended"
        return ""

    def action_cancel(self) -> None:
        for job in self._table.chosen:
            if job.cancelable:
                self.ask(f"Cancel job {job.number}", self.node.cancel(job))

    def action_job_details(self) -> None:
        pass
