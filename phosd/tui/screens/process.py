"""Show one process: its images, jobs, memory and launched kernels."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.widgets import Static, TabbedContent, TabPane

from phosd.client.errors import CommandError
from phosd.client.kernels import Kernel as KnownKernel
from phosd.client.kernels import kernel
from phosd.client.records import Gpu, Image, Job, Process
from phosd.client.text import container_text, level_of
from phosd.tui.actions import Action, bindings
from phosd.tui.node import Contact, Node
from phosd.tui.screens.base import NodeScreen
from phosd.tui.screens.jobs import JobScreen
from phosd.tui.text import Cell, command_line, human_bytes, plain, seconds, since
from phosd.tui.widgets.job import progress_text, result_text, state_cell
from phosd.tui.widgets.listing import Listing
from phosd.tui.widgets.table import Column, RecordTable
from phosd.units import duration_text


@dataclass(frozen=True)
class MemoryBlock:
    """One allocation of the process; ``gpu`` is -1 for host memory."""

    id: int
    address: int
    size: int
    gpu: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Kernel:
    """A kernel that the process launched since a checkpoint last began to copy on write.
    ``accesses`` says what is known of what it reads and writes, ``again`` which launches may be
    run again.
    """

    name: str
    module: str
    launches: int
    suspect: bool
    accesses: str = ""
    again: str = ""


class ProcessScreen(NodeScreen):
    """The screen of one process."""

    SCOPE = "process"
    TITLE_TEXT = "Process"
    SHOWS = frozenset({Process, Image, Job, Gpu, Contact})
    BINDINGS = bindings("process")
    DEFAULT_CSS = """
    ProcessScreen .facts { height: auto; padding: 0 1; background: $boost; }
    ProcessScreen TabbedContent { height: 1fr; }
    ProcessScreen TabPane { padding: 0; }
    """

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self._said = {"process-blocks": "blocks", "process-kernels": "kernels"}

    def body(self) -> ComposeResult:
        yield Static(classes="facts", markup=False)
        with TabbedContent(initial="images"):
            with TabPane("Images", id="images"):
                yield Listing(RecordTable(_image_columns(self)), "no image of it yet")
            with TabPane("Jobs", id="jobs"):
                table = RecordTable(_job_columns(), descending=True)
                yield Listing(table, "no job worked on it lately")
            with TabPane("Blocks", id="blocks"):
                yield Listing(RecordTable(_block_columns()), "not asked yet")
            with TabPane("Kernels", id="kernels"):
                yield Listing(RecordTable(_kernel_columns(), sort=2), "not asked yet")

    def on_mount(self) -> None:
        self.action_read_again()

    def show(self, node: Node) -> None:
        known = node.of(Process).get(self._process.path)
        self._process = known or self._process
        process = self._process
        self.query_one(".facts", Static).update(_facts(process, node, ended=known is None))
        images = {p: i for p, i in node.of(Image).items() if i.pid == process.pid}
        self._list("images").show_records(images)
        jobs = {p: j for p, j in node.of(Job).items() if str(process.pid) in j.targets}
        self._list("jobs").show_records(jobs)

    def tick(self) -> None:
        super().tick()
        self.show(self.node)

    def _list(self, tab: str) -> Listing[Any]:
        return self.query_one(f"#{tab}", TabPane).query_one(Listing)

    @on(TabbedContent.TabActivated)
    def _focus_table(self, event: TabbedContent.TabActivated) -> None:
        event.pane.query_one(RecordTable).focus()

    def on_record_table_chosen(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        """Open the page of the selected job."""
        if self.query_one(TabbedContent).active == "jobs":
            job = self._list("jobs").table.current
            if job is not None:
                self.app.push_screen(JobScreen(job))

    def action_tab(self, step: int) -> None:
        """Switch to the next or previous tab."""
        tabs = ["images", "jobs", "blocks", "kernels"]
        content = self.query_one(TabbedContent)
        content.active = tabs[(tabs.index(content.active) + step) % len(tabs)]

    def _kernel(self) -> Kernel | None:
        """Return the kernel under the cursor, if kernels are shown."""
        if self.query_one(TabbedContent).active != "kernels":
            return None
        kernel = self._list("kernels").table.current
        return kernel if isinstance(kernel, Kernel) else None

    def cannot(self, action: Action) -> str:
        if action.id == "trust":
            kernel = self._kernel()
            if kernel is None:
                return "choose a kernel on the tab Kernels"
            return "" if kernel.suspect else f"{kernel.name} is no suspect"
        return ""

    def action_trust(self) -> None:
        """Clear the kernel under the cursor of suspicion."""
        if (kernel := self._kernel()) is not None:
            self.ask(f"Trust {kernel.name}", self._trust(kernel))

    async def _trust(self, kernel: Kernel) -> str:
        count = await self.node.ask(self._process, "TrustKernels", kernel=kernel.name)
        self.action_read_again()
        return f"suspect kernels cleared: {count}"

    def action_read_again(self) -> None:
        """Read blocks and kernels from the hook."""
        for feature, tab in self._said.items():
            if feature not in self.node.manager.features:
                self._list(tab).say("this phosd does not tell it")
            else:
                self._list(tab).say("asked, and waiting for the answer")
                self.run_worker(self._read(tab), exit_on_error=False)

    async def _read(self, tab: str) -> None:
        member = "ListBlocks" if tab == "blocks" else "ListKernels"
        try:
            rows = await self.node.ask(self._process, member)
        except CommandError as error:
            self._list(tab).say(str(error))
            return
        records: Mapping[str, MemoryBlock | Kernel]
        if tab == "blocks":
            found = [MemoryBlock(row[0], row[1], row[2], row[3], tuple(row[4])) for row in rows]
            records = {f"{block.id:020}": block for block in found}
        else:
            kernels = await self._with_accesses([Kernel(*row) for row in rows])
            records = {f"{kernel.module} {kernel.name}": kernel for kernel in kernels}
        self._list(tab).say("none")
        self._list(tab).show_records(records)

    async def _with_accesses(self, kernels: list[Kernel]) -> list[Kernel]:
        """Add what the analysis knows, if phosd has one and the hook answers once more."""
        if "kernel-analysis" not in self.node.manager.features:
            return kernels
        try:
            rows = await self.node.ask(self._process, "DescribeKernels")
        except CommandError:
            return kernels  # what the hook has told before is shown without
        known = {(found.module, found.name): found for found in map(kernel, rows)}
        return [
            replace(each, accesses=_accesses(found), again=found.idempotent)
            if (found := known.get((each.module, each.name)))
            else each
            for each in kernels
        ]


def _accesses(known: KnownKernel) -> str:
    """Say what is known of a kernel: all ranges, through which parameters, or why nothing."""
    if known.state != "analysed":
        return known.state
    if reasons := sorted({*known.unknown_reads, *known.unknown_writes}):
        return f"unknown: {', '.join(reasons)}"
    return "ranges" if known.ranges_read and known.ranges_written else "parameters"


def _facts(process: Process, node: Node, *, ended: bool) -> Text:
    gpus = node.of(Gpu)
    names = [f"{gpus[path].ordinal}" for path in process.gpus if path in gpus]
    called = f"{plain(process.name)}, " if process.name else ""
    text = Text.assemble((f"{called}{process.pid} {command_line(process.command)}", "bold"))
    if ended:
        text.append("  (it has ended)", "bold red")
    place = f"   container {plain(container_text(process.container))}" if process.container else ""
    pool = f"   pool {plain(process.pool)}" if process.pool else ""
    hook = process.hook + (f" ({process.reason})" if process.reason else "")
    image = node.image(process.last_image)
    age = f", {since(image.created, node.now())} old" if image else ""
    every = (
        f"every {duration_text(process.every)}, the last {process.keep} kept"
        if process.every
        else "no"
    )
    text.append(
        f"\nuser {plain(process.user_name)}   GPU {', '.join(names) or '-'}   "
        f"{human_bytes(process.device_bytes)}   state {plain(level_of(process))}{pool}{place}"
        f"\nhook {plain(hook)}\nlast image {plain(process.last_image) or 'none'}{age}   "
        f"periodic checkpoints: {every}",
        "",
    )
    return text


def _image_columns(screen: ProcessScreen) -> list[Column[Image]]:
    return [
        Column("IMAGE", 24, lambda i: plain(i.id), lambda i: i.id),
        Column("AGE", 7, lambda i: since(i.created, screen.node.now()), lambda i: i.created or 0.0,
               right=True),
        Column("SIZE", 10, lambda i: human_bytes(i.total_bytes), lambda i: i.total_bytes,
               right=True),
        Column("STOP", 8, lambda i: seconds(i.stop_seconds), lambda i: i.stop_seconds, right=True,
               rank=1),
        Column("MODE", 0, lambda i: plain(i.mode), lambda i: i.mode),
    ]  # fmt: skip


def _job_columns() -> list[Column[Job]]:
    return [
        Column("JOB", 6, lambda j: str(j.number), lambda j: j.number, right=True),
        Column("OPERATION", 11, lambda j: plain(j.operation), lambda j: j.operation),
        Column("STATE", 11, state_cell, lambda j: j.state),
        Column("PHASE", 9, lambda j: plain(j.phase), lambda j: j.phase),
        Column("PROGRESS", 11, progress_text, lambda j: j.progress or 0.0, rank=1),
        Column("RESULT", 0, lambda j: plain(j.message) or result_text(j), lambda j: j.result),
    ]


def _block_columns() -> list[Column[MemoryBlock]]:
    return [
        Column("BLOCK", 8, lambda b: str(b.id), lambda b: b.id, right=True),
        Column("ADDRESS", 16, lambda b: f"{b.address:#x}", lambda b: b.address, right=True),
        Column("SIZE", 10, lambda b: human_bytes(b.size), lambda b: b.size, right=True),
        Column("GPU", 5, lambda b: "host" if b.gpu < 0 else str(b.gpu), lambda b: b.gpu),
        Column("FLAGS", 0, lambda b: plain(", ".join(b.flags)), lambda b: b.flags),
    ]


def _suspect(kernel: Kernel) -> Cell:
    return ("! suspect", "warn") if kernel.suspect else ("", "")


def _kernel_columns() -> list[Column[Kernel]]:
    return [
        Column("LAUNCHES", 10, lambda k: str(k.launches), lambda k: -k.launches, right=True),
        Column("MODULE", 16, lambda k: plain(k.module), lambda k: k.module, rank=1),
        Column("SUSPECT", 9, _suspect, lambda k: (not k.suspect, -k.launches)),
        Column("ACCESSES", 18, lambda k: plain(k.accesses), lambda k: k.accesses, rank=2),
        Column("AGAIN", 8, lambda k: plain(k.again), lambda k: k.again, rank=2),
        Column("KERNEL", 0, lambda k: plain(k.name), lambda k: k.name),
    ]
