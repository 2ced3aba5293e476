"""Show the home screen: GPUs, processes, and the jobs that work on them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import Static

from phosd.client.records import Gpu, Image, Job, Process
from phosd.client.storage import Storage
from phosd.tui.actions import Action, bindings
from phosd.tui.names import target_text
from phosd.tui.node import Contact, Node
from phosd.tui.output_tail import Tails
from phosd.tui.programs import Programs
from phosd.tui.screens import moving, process_work
from phosd.tui.screens.base import NodeScreen
from phosd.tui.screens.process import ProcessScreen
from phosd.tui.screens.process_columns import PROTECTED, ProcessColumns
from phosd.tui.screens.process_state import hints, images_of, said_of, standing, there
from phosd.tui.screens.process_work import named
from phosd.tui.screens.ring import RingScreen
from phosd.tui.text import plain
from phosd.tui.widgets.dialogs import Form, Question
from phosd.tui.widgets.gpus import GpuLines
from phosd.tui.widgets.job import job_line
from phosd.tui.widgets.lately import Lately
from phosd.tui.widgets.lines import Lines
from phosd.tui.widgets.listing import UNKNOWN, Listing
from phosd.tui.widgets.node_line import NodeLine
from phosd.tui.widgets.pane import Content, ProgramPane
from phosd.tui.widgets.table import RecordTable

_NOTHING = "no GPU processes; `phos run -- python train.py` starts one that can be saved"
_MOST_JOBS = 4
"""Most jobs below the table; the screen Jobs has all."""
_WITH_PANE, _LEAST_PANE, _WIDEST_PANE = 140, 42, 80
"""Columns of the terminal from which there is a pane, and columns of the pane."""
_AROUND_ROWS = 3
"""Lines of a listing besides its rows: titles, their number, and the filter."""
_LEAST_LATELY = 4


class ProcessesScreen(NodeScreen):
    """The GPU processes of the node."""

    SCOPE = "processes"
    TITLE_TEXT = "Processes"
    SHOWS = frozenset({Process, Gpu, Job, Image, Storage, Contact})
    BINDINGS = bindings("processes")
    DEFAULT_CSS = """
    ProcessesScreen Horizontal { height: 1fr; }
    ProcessesScreen .about { height: auto; max-height: 3; padding: 0 1; color: $text-muted; }
    ProcessesScreen .jobs { background: $boost; text-overflow: ellipsis; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._programs = Programs()
        self._basis: object = None
        """What the parts that change seldom were drawn from."""
        self._moment = 0.0
        """Time of what the pane says."""
        self._images: tuple[object, list[Image]] = (None, [])
        self._tails = Tails(self._tail_came)
        self._tail: tuple[str, list[str]] = ("", [])
        self._said: str | None = None
        """What is said below the table; None: nothing yet."""

    def body(self) -> ComposeResult:
        yield NodeLine()
        yield GpuLines()
        columns = ProcessColumns(self.node, self._programs)
        with Horizontal():
            table = RecordTable(columns.all(), sort=PROTECTED, steady=False)
            with Vertical():
                yield Listing(table, UNKNOWN)
                yield Lately()
            yield ProgramPane(lambda: self.node)
        yield Static(classes="about", markup=False)
        yield Lines(classes="jobs")

    # Drawing

    @property
    def table(self) -> RecordTable[Process]:
        """The table of processes."""
        return self.query_one(RecordTable)

    def show(self, node: Node) -> None:
        basis = (self.size, node.contact, node.changes[Gpu], node.changes[Storage])
        if self._programs.look(node) or basis != self._basis:
            self._basis = basis
            self._show_slow()
        listing = self.query_one(Listing)
        listing.say(_NOTHING if node.heard else UNKNOWN)
        listing.show_records(node.of(Process))
        self._show_jobs()
        self._show_about()

    def tick(self) -> None:
        super().tick()
        self._moment = self.node.now()
        self._programs.look(self.node, again=True)
        self._basis = None
        self.show(self.node)
        self._read_output()

    def _show_slow(self) -> None:
        """Show what changes seldom, or need not be more exact than a second."""
        self._show_pane_or_not()
        self.query_one(NodeLine).show(self.node, self._programs.all)
        self.query_one(GpuLines).show(self.node, most=8 if self.size.height >= 40 else 3)
        self._show_lately()

    def _show_jobs(self) -> None:
        jobs = self.node.active_jobs
        lines = [
            job_line(job, self.node.now(), target_text(job, self.node)) for job in jobs[:_MOST_JOBS]
        ]
        if len(jobs) > _MOST_JOBS:
            lines.append(Text(f"and {len(jobs) - _MOST_JOBS} more jobs (2)", "dim"))
        self.query_one(".jobs", Lines).say(lines)

    def _show_pane_or_not(self) -> None:
        """Show the pane where there is room beside the table."""
        pane, width = self.query_one(ProgramPane), self.size.width
        pane.display = width >= _WITH_PANE
        pane.styles.width = min(_WIDEST_PANE, _LEAST_PANE + (width - _WITH_PANE) // 4)

    def _show_lately(self) -> None:
        """Leave to the jobs that ended last what the table does not need."""
        listing, lately = self.query_one(Listing), self.query_one(Lately)
        needed = self.table.shown + _AROUND_ROWS
        room = self.query_one(Vertical).size.height - needed
        over = any(job.over for job in self.node.of(Job).values())
        lately.display = over and room >= _LEAST_LATELY
        listing.styles.height = needed if lately.display else "1fr"
        lately.refresh()

    def _show_about(self) -> None:
        """Show what does not fit into the row: in the pane, or else below the table."""
        process, pane = self.table.current, self.query_one(ProgramPane)
        if pane.display:
            self._say("")
            pane.show(self._content(process) if process is not None else None)
            return
        self._say("; ".join(said_of(process, self.node)) if process is not None else "")

    def _say(self, text: str) -> None:
        """Say something below the table, if there is anything to say."""
        if text != self._said:
            self._said = text
            place = self.query_one(".about", Static)
            place.display = bool(text)
            place.update(plain(text))

    def _content(self, process: Process) -> Content | None:
        program = self._programs.of.get(process.path)
        if program is None:
            return None
        output = process.output[0] if process.output else ""
        lines = self._tail[1] if self._tail[0] == output else []
        return Content(
            process,
            program,
            self._images_of(process),
            hints(process, self.node),
            self.node.job_of(str(process.pid)),
            output,
            lines,
            self._moment or self.node.now(),
        )

    def _images_of(self, process: Process) -> list[Image]:
        """Return the images of the program, as they were when one changed last."""
        basis = (process.path, process.name, self.node.changes[Image])
        if self._images[0] != basis:
            self._images = (basis, images_of(process, self.node))
        return self._images[1]

    def on_record_table_moved(self) -> None:
        super().on_record_table_moved()
        self._show_about()
        self._read_output()

    def _read_output(self) -> None:
        """Read the end of the output of the chosen program, where it is shown."""
        process = self.table.current
        shown = self.node.here and self.query_one(ProgramPane).display
        if process is not None and process.output and shown:
            self._tails.want(process.output[0])

    def _tail_came(self, path: str, lines: list[str]) -> None:
        self._tail = (path, lines)
        if self.framed:
            self._show_about()

    def on_unmount(self) -> None:
        self._tails.stop()

    # Actions

    @property
    def actions(self) -> list[Action]:
        chosen = self.table.chosen if self.framed else []
        asleep = chosen and all(process.state == moving.SUSPENDED for process in chosen)
        return [
            replace(action, name="Resume", help="bring the process back to its GPU")
            if asleep and action.id == "suspend"
            else action
            for action in super().actions
        ]

    def cannot(self, action: Action) -> str:
        chosen = self.table.chosen
        if not chosen:
            return "there is no process"
        saves = action.id.startswith("checkpoint") or action.id in ("end", "schedule")
        if saves and all(p.hook == "unsupported" for p in chosen):
            first = chosen[0]
            return f"{first.pid} cannot be saved: {first.reason or 'it is not supported'}"
        if saves and all(p.state == moving.SUSPENDED for p in chosen):
            return f"{chosen[0].pid} is suspended; `s` resumes it"
        if action.id == "swap":
            return moving.why_not_swap(chosen)
        if action.id == "migrate":
            return moving.why_not_migrate(self.node, chosen)
        if action.id == "suspend":
            return moving.why_not_suspend(chosen)
        if action.id == "log" and chosen[0].hook != "hooked":
            return f"{chosen[0].pid} has no hook; start it with `phos run`"
        if action.id == "recover" and not standing(chosen, self.node):
            return f"{chosen[0].pid} was not left standing still"
        return ""

    def action_checkpoint(self) -> None:
        for process in self.table.chosen:
            self.ask(f"Checkpoint of {process.pid}", self.node.call("Checkpoint", process.pid))

    def action_checkpoint_with(self) -> None:
        process_work.checkpoint_with(self, self.table.chosen)

    def action_schedule(self) -> None:
        process_work.schedule(self, self.table.chosen)

    def action_suspend(self) -> None:
        """Resume what is suspended; suspend the others after a question."""
        chosen = self.table.chosen
        running = [process for process in chosen if process.state != moving.SUSPENDED]
        for process in chosen:
            if process not in running:
                self.ask(f"Resume {process.pid}", self.node.call("Resume", process.pid))
        if running:
            question = (
                f"Suspend {named(running)}?\n\nIt stands still until it is resumed, and leaves "
                "nothing on its GPUs."
            )
            self._after_question(
                question, "Suspend", running, lambda p: self.node.call("Suspend", p.pid)
            )

    def action_end(self) -> None:
        chosen = [process for process in self.table.chosen if process.state != moving.SUSPENDED]
        question = (
            f"Save and end {named(chosen)}?\n\nIt stands still until its image is on the disk, "
            "and ends. A restore continues it from there."
        )
        self._after_question(
            question,
            "Save and end",
            chosen,
            lambda p: self.node.call("Checkpoint", p.pid, then="end"),
        )

    def action_swap(self) -> None:
        leaving, coming = sorted(
            self.table.chosen, key=lambda process: process.state == moving.SUSPENDED
        )
        question = (
            f"Suspend {named([leaving])}, and resume {named([coming])} in its place?\n\nThe "
            "first stands still until it is resumed."
        )
        self._after_question(
            question, "Swap", [leaving], lambda p: self.node.call("Swap", p.pid, coming.pid)
        )

    def _after_question(
        self,
        question: str,
        what: str,
        processes: Sequence[Process],
        work: Callable[[Process], Awaitable[str]],
    ) -> None:
        """Ask, and then do ``work`` with each process that is still there."""

        def answered(yes: bool | None) -> None:
            for process in there(processes, self.node) if yes else ():
                self.ask(f"{what} {process.pid}", work(process))

        gone = partial(process_work.gone, self, processes)
        self.app.push_screen(Question(question, what, gone), answered)

    def action_migrate(self) -> None:
        chosen = self.table.chosen
        self.app.push_screen(
            Form(
                f"Migration of {named(chosen)}",
                moving.choices(self.node, chosen),
                "Migrate",
                partial(process_work.gone, self, chosen),
            ),
            partial(self._migrate, chosen),
        )

    def _migrate(self, chosen: list[Process], given: dict[str, str] | None) -> None:
        if given is not None:
            for process in there(chosen, self.node):
                work = self.node.call("Migrate", process.pid, moving.destination(given))
                self.ask(f"Migrate {process.pid}", work)

    def action_recover(self) -> None:
        chosen = standing(self.table.chosen, self.node)

        def answered(yes: bool | None) -> None:
            for process in standing(chosen, self.node) if yes else ():
                self.ask(f"Recover {process.pid}", self.node.call("Recover", process.pid))

        def gone() -> str:
            return "" if standing(chosen, self.node) else "Nothing stands still any more."

        states = ", ".join(sorted({process.state for process in chosen}))
        question = (
            f"Recover {named(chosen)}?\n\nNo job works on it, and it is {states}. Another tool "
            "may mean it to be; if none does, phosd resumes it."
        )
        self.app.push_screen(Question(question, "Recover", gone), answered)

    def action_details(self) -> None:
        process = self.table.current
        if process is not None:
            self.app.push_screen(ProcessScreen(process))

    def action_log(self) -> None:
        process = self.table.current
        if process is not None:
            self.app.push_screen(RingScreen(process))
