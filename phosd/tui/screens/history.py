"""Show past jobs, and plot stop time, drain rate and image size over time."""

import asyncio
from datetime import datetime
from typing import Any

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.widgets import Static

from phosd.client.errors import CommandError
from phosd.client.past import past_job
from phosd.client.records import Image, Job, Manager
from phosd.client.text import WITHIN
from phosd.tui import export
from phosd.tui.actions import Action, bindings
from phosd.tui.names import names_by_pid, target_name, target_text
from phosd.tui.node import Contact, Node
from phosd.tui.past import MOST_ROWS, moment
from phosd.tui.screens.base import NodeScreen
from phosd.tui.screens.jobs import JobScreen
from phosd.tui.screens.reading import Reading
from phosd.tui.text import Cell, human_bytes, plain, rate, seconds, when
from phosd.tui.widgets.chart import Chart, Plot
from phosd.tui.widgets.dialogs import Choice, Field, Form
from phosd.tui.widgets.job import result_cell, state_cell
from phosd.tui.widgets.listing import Listing
from phosd.tui.widgets.table import Column, RecordTable

_SHOWN = 500
"""Most jobs on the screen; an export has all that phosd returns."""
_FILTERS = ("pid", "since", "until", "operation", "state")
_OF_PROCESSES = ("checkpoint", "migrate", "suspend", "resume", "swap", "recover")
_OPERATIONS = (*_OF_PROCESSES, "restore", "start", "verify", "delete", "export", "import")
_STATES = ("done", "failed", "cancelled", "interrupted", "running", "queued")


class HistoryScreen(NodeScreen):
    """The latest jobs that pass the filters, newest first, and plots of them."""

    SCOPE = "history"
    TITLE_TEXT = "History"
    SHOWS = frozenset({Job, Image, Manager, Contact})
    BINDINGS = bindings("history")
    DEFAULT_CSS = """
    HistoryScreen .plots { height: 35%; min-height: 7; background: $boost; }
    HistoryScreen .about { height: 1; padding: 0 1; color: $text-muted; text-wrap: nowrap; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._reading = Reading(self, self._read)
        self._jobs: dict[str, Job] = {}
        self._filters: dict[str, str] = {}
        self._states: set[tuple[str, str]] = set()
        self._trouble = ""
        self._plotted = ""
        """The program that the plots are of; empty: all of them."""
        self._names: dict[str, str] = {}
        """Names of programs by pid, as the jobs on the screen tell them."""

    def body(self) -> ComposeResult:
        columns: list[Column[Job]] = [
            Column("TARGET", 14, self._target, self._target, grow=20),
            Column("JOB", 6, lambda j: str(j.number), lambda j: j.number, right=True),
            Column("STARTED", 16, lambda j: when(j.started)[:16], lambda j: j.started or 0.0,
                   rank=6),
            Column("OPERATION", 10, lambda j: plain(j.operation), lambda j: j.operation),
            Column(WITHIN, 16, lambda j: plain(j.within), lambda j: j.within, rank=5, grow=20,
                   sparse=True),
            Column("STATE", 13, state_cell, lambda j: j.state),
            Column("STOP", 8, lambda j: seconds(j.stop_seconds) if j.stop_seconds else "",
                   lambda j: j.stop_seconds, right=True, rank=2),
            Column("DRAIN", 11, lambda j: rate(j.drain_rate), lambda j: j.drain_rate,
                   right=True, rank=4),
            Column("SAVED", 10, lambda j: human_bytes(j.drained_bytes) if j.drained_bytes else "",
                   lambda j: j.drained_bytes, right=True, rank=5),
            Column("MODE", 10, lambda j: plain(j.mode), lambda j: j.mode, rank=7),
            Column("WRONG", 6, _wrong, lambda j: j.wrong_guesses, rank=8),
            Column("RESULT", 0, result_cell, lambda j: j.message or j.result, rank=1),
        ]  # fmt: skip
        with Horizontal(classes="plots"):
            yield Chart(id="stop")
            yield Chart(id="drain")
            yield Chart(id="size")
        yield Static(classes="about", markup=False)
        yield Listing(RecordTable(columns, sort=1, descending=True), "not asked yet")

    def _target(self, job: Job) -> str:
        return target_text(job, self.node, self._names)

    @property
    def table(self) -> RecordTable[Job]:
        """The table of jobs."""
        return self.query_one(RecordTable)

    # Drawing

    def node_changed(self, changed: frozenset[type]) -> None:
        super().node_changed(changed)
        states = {(path, job.state) for path, job in self.node.of(Job).items()}
        if self.framed and (Manager in changed or states != self._states):
            self._states = states
            self._reading.want()

    async def _read(self) -> None:
        if self.node.contact is not Contact.HERE:
            return
        try:
            rows = await self.node.history(limit=_SHOWN, **self._wanted())
        except CommandError as error:
            self._trouble = f"{error.code}: {error}"
        else:
            self._trouble = ""
            self._jobs = {f"{job.number:020}": job for job in map(past_job, rows)}
            self._names = names_by_pid(self._jobs.values(), self.node)
        self.show(self.node)

    def _wanted(self) -> dict[str, int | str]:
        """Return the filters as options of ``ListHistory``."""
        given = {name: text for name, text in self._filters.items() if text}
        wanted: dict[str, int | str] = dict(given)
        if "pid" in given:
            wanted["pid"] = int(given["pid"])
        for name in {"since", "until"} & given.keys():
            wanted[name] = moment(given[name], self.node.now()) or 0
        return wanted

    def show(self, node: Node) -> None:
        listing = self.query_one(Listing)
        filtered = " that the filter lets through; f has others" if any(self._wanted()) else ""
        listing.say(self._trouble or f"no jobs{filtered}")
        listing.show_records(self._jobs)
        self._plot(node)
        self._show_about()

    def _show_about(self) -> None:
        self.query_one(".about", Static).update(plain(self._about()))

    def _about(self) -> str:
        filters = self._filters
        given = [f"{name} {filters[name]}" for name in _FILTERS if filters.get(name)]
        shown = ", ".join(given) if given else "all processes, all times"
        latest = f"; the latest {_SHOWN}" if len(self._jobs) == _SHOWN else ""
        trouble = f"{self._trouble}. " if self._trouble and self._jobs else ""
        plots = f"Plots of {self._plotted or 'all programs'}. "
        return f"{trouble}{plots}Shown: {shown}{latest} (f filters, p takes the process of the row)"

    def on_record_table_moved(self) -> None:
        super().on_record_table_moved()
        self._plot(self.node)
        self._show_about()

    def _plot(self, node: Node) -> None:
        """Plot the checkpoints of the program of the row; of all, if the row is of none."""
        current = self.table.current
        program = self._program(current) if current is not None else ""
        saved = [
            job
            for job in self._jobs.values()
            if job.operation == "checkpoint" and job.started
            if not program or self._program(job) == program
        ]
        self._plotted = program
        span = self._span(saved, node.now())
        figures = {
            "stop": ("Stop time", [j.stop_seconds for j in saved], seconds),
            "drain": ("Drain rate", [j.drain_rate for j in saved], _rate),
            "size": ("Image, device", [_size(j, node) for j in saved], human_bytes),
        }
        for name, (title, values, write) in figures.items():
            times = (job.started or 0.0 for job in saved)
            points = sorted(point for point in zip(times, values, strict=True) if point[1])
            told = f": {write(points[-1][1])}" if points else ""
            plot = Plot(title + told, points, span, write, nothing="no checkpoint told it")
            self.query_one(f"#{name}", Chart).show(plot)

    def _span(self, saved: list[Job], now: float) -> tuple[float, float]:
        """Return the times from which to which the plots go."""
        wanted = self._wanted()
        first = min((job.started or now for job in saved), default=now)
        return (
            int(wanted["since"]) / 1e6 if "since" in wanted else first - 1.0,
            int(wanted["until"]) / 1e6 if "until" in wanted else now,
        )

    def _program(self, job: Job) -> str:
        """Return the name of a job's program, or its pid; empty if neither is known."""
        name = target_name(job, self.node, self._names)
        return name.partition("@")[0] or _pid(job)

    # Actions

    def cannot(self, action: Action) -> str:
        current = self.table.current
        if action.id == "past_job" and current is None:
            return "there is no job"
        if action.id == "one_process" and not self._filters.get("pid"):
            return "" if current is not None and _pid(current) else "the job is of no process"
        return ""

    def action_past_job(self) -> None:
        if self.table.current is not None:
            self.app.push_screen(JobScreen(self.table.current))

    def action_one_process(self) -> None:
        """Filter by the process of the row, or remove that filter."""
        current = self.table.current
        shown = self._filters.get("pid")
        pid = "" if shown or current is None else _pid(current)
        self._take(self._filters | {"pid": pid})

    def action_filters(self) -> None:
        now, given = self.node.now(), self._filters
        written = "30m, 2h, 7d (ago), 2026-11-21T15:30"
        fields: list[Choice | Field] = [
            Field("pid", "Process", given.get("pid", ""), "pid", _pid_trouble),
            Field("since", "Began then or later", given.get("since", ""), written,
                  lambda text: _moment_trouble(text, now)),
            Field("until", "Began then or before", given.get("until", ""), written,
                  lambda text: _moment_trouble(text, now)),
            _choice("operation", "What it did", _OPERATIONS, given),
            _choice("state", "How it ended", _STATES, given),
        ]  # fmt: skip
        self.app.push_screen(Form("Which jobs", fields, "Show"), self._take)

    def _take(self, given: dict[str, str] | None) -> None:
        if given is not None:
            self._filters = given
            self.show(self.node)
            self._reading.want()

    def action_export(self) -> None:
        stamp = datetime.fromtimestamp(self.node.now()).strftime("%Y%m%dT%H%M%S")
        about = "File; .csv has a line a job, .json all, with phases"
        name = Field("file", about, f"phos-history-{stamp}.csv", check=export.trouble)
        title = "Export the jobs that the filters let through"
        self.app.push_screen(Form(title, [name], "Export"), self._export)

    def _export(self, given: dict[str, str] | None) -> None:
        if given is not None:
            self.ask("Export", self._exported(given["file"], self._wanted()))

    async def _exported(self, name: str, wanted: dict[str, Any]) -> str:
        rows = await self.node.history(limit=MOST_ROWS, **wanted)
        try:
            path = await asyncio.to_thread(export.write, name, rows)
        except OSError as error:
            raise CommandError(
                "NotWritten", f"{name} cannot be written ({error.strerror}); choose another file"
            ) from error
        most = f" (phosd tells of the latest {MOST_ROWS})" if len(rows) == MOST_ROWS else ""
        return f"{len(rows)} jobs{most} are in {path}"


def _choice(name: str, label: str, values: tuple[str, ...], given: dict[str, str]) -> Choice:
    """Return a choice whose first value is the one given before."""
    order = sorted(["", *values], key=lambda value: value != given.get(name, ""))
    return Choice(name, label, [(value or "all", value) for value in order])


def _pid_trouble(text: str) -> str:
    if not text or (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 32):
        return ""
    return f"{text!r} is no pid; write its number, or nothing for all"


def _moment_trouble(text: str, now: float) -> str:
    try:
        moment(text, now)
    except ValueError as error:
        return str(error)
    return ""


def _pid(job: Job) -> str:
    """Return the pid that a job worked on; empty for a job on an image."""
    pids = [job.result] if job.operation == "restore" else job.targets
    known = job.operation in (*_OF_PROCESSES, "restore") and pids and pids[0].isdigit()
    return pids[0] if known else ""


def _size(job: Job, node: Node) -> float:
    """Return the device memory in a job's image: as the image says, else as the job saved."""
    image = node.image(job.result)
    return image.device_bytes if image else job.drained_bytes


def _rate(value: float) -> str:
    return rate(value) or "0"


def _wrong(job: Job) -> Cell:
    return (f"! {job.wrong_guesses}", "warn") if job.wrong_guesses else ""
