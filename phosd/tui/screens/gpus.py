"""Show one GPU at a time: charts of its figures, and the processes that hold its memory."""

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Grid
from textual.widgets import Static

from phosd.client.records import Gpu, Process
from phosd.client.text import NO_GPU, level_of
from phosd.tui.actions import Action, bindings
from phosd.tui.names import program_cell
from phosd.tui.node import SAMPLES, Contact, Node, Sample
from phosd.tui.screens.base import NodeScreen
from phosd.tui.screens.evacuation import evacuate
from phosd.tui.screens.process import ProcessScreen
from phosd.tui.text import Cell, bar, command_line, human_bytes, plain
from phosd.tui.widgets.chart import Chart, Plot
from phosd.tui.widgets.listing import Listing
from phosd.tui.widgets.table import Column, RecordTable

_SECONDS = SAMPLES * 2.0
"""Time span of the charts."""
_HOLD = 5.0
"""Seconds for which a sample counts; a longer gap between samples is drawn as a gap."""
_BAR = 10
_WIDE, _HIGH = 120, 34
"""Least size in cells to show all charts at once."""


@dataclass(frozen=True)
class Figure:
    """A figure that a GPU reports. ``of`` extracts it from a sample, ``most`` is the top of the
    chart (0: the greatest value so far).
    """

    name: str
    of: Callable[[Sample], float | None]
    write: Callable[[float], str]
    most: Callable[[Gpu], float] = lambda gpu: 0.0


FIGURES = (
    Figure("Load", lambda s: s.utilisation, lambda v: f"{v:.0%}", lambda gpu: 1.0),
    Figure("Memory", lambda s: s.memory_used, human_bytes, lambda gpu: float(gpu.memory_total)),
    Figure("Temperature", lambda s: s.temperature, lambda v: f"{v:.0f} °C", lambda gpu: 100.0),
    Figure("Power", lambda s: s.power, lambda v: f"{v:.0f} W"),
)


class GpusScreen(NodeScreen):
    """One GPU of the node, with all its figures."""

    SCOPE = "gpus"
    TITLE_TEXT = "GPUs"
    SHOWS = frozenset({Gpu, Process, Contact})
    BINDINGS = bindings("gpus")
    DEFAULT_CSS = """
    GpusScreen .which { height: auto; max-height: 4; padding: 0 1; background: $boost; }
    GpusScreen Grid { height: 1fr; min-height: 6; grid-size: 1; }
    GpusScreen Grid.-side { grid-size: 2 1; }
    GpusScreen Grid.-all { grid-size: 2 2; height: 2fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._path = ""
        self._figure = 0

    def body(self) -> ComposeResult:
        columns: list[Column[Process]] = [
            Column("NAME", 12, program_cell, lambda p: (not p.name, p.name, p.command), grow=14),
            Column("PID", 8, lambda p: str(p.pid), lambda p: p.pid, right=True),
            Column("USER", 8, lambda p: plain(p.user_name), lambda p: p.user_name, rank=2),
            Column("MEMORY", 10, lambda p: human_bytes(p.device_bytes), lambda p: p.device_bytes,
                   right=True),
            Column("OF THE GPU", 16, self._share, lambda p: p.device_bytes),
            Column("STATE", 12, lambda p: plain(level_of(p)), level_of, rank=1),
            Column("COMMAND", 0, lambda p: command_line(p.command), lambda p: p.command,
                   rank=3),
        ]  # fmt: skip
        yield Static(classes="which", markup=False)
        with Grid():
            for figure in FIGURES:
                yield Chart(id=figure.name.lower())
        yield Listing(RecordTable(columns, sort=3, descending=True), "nobody holds memory of it")

    @property
    def table(self) -> RecordTable[Process]:
        """The table of processes that hold its memory."""
        return self.query_one(RecordTable)

    @property
    def gpu(self) -> Gpu | None:
        """The GPU on the screen: the first one until the user chooses another, or when that is
        gone.
        """
        gpus = self.node.of(Gpu)
        return gpus.get(self._path) or next(iter(self.node.gpus), None)

    # Drawing

    def show(self, node: Node) -> None:
        gpu = self.gpu
        self.query_one(".which", Static).update(self._which(gpu))
        self._show_charts(gpu, node)
        holders = node.holders(gpu) if gpu is not None else []
        self.query_one(Listing).show_records({process.path: process for process in holders})

    def _show_charts(self, gpu: Gpu | None, node: Node) -> None:
        """Show the figures that the GPU tells: all of them where there is room, else one."""
        told = [figure for figure in FIGURES if gpu is not None and _tells(gpu, figure, node)]
        every = self.size.width >= _WIDE and self.size.height >= _HIGH
        shown = told if every or not told else [told[self._figure % len(told)]]
        grid = self.query_one(Grid)
        grid.display = bool(shown)
        grid.set_class(len(shown) > 1, "-side")
        grid.set_class(len(shown) > 2, "-all")
        for figure in FIGURES:
            chart = self.query_one(f"#{figure.name.lower()}", Chart)
            chart.display = figure in shown
            if gpu is not None and chart.display:
                chart.show(_plot(figure, gpu, node))

    def tick(self) -> None:
        super().tick()
        self.show(self.node)

    def _which(self, gpu: Gpu | None) -> Text:
        if gpu is None:
            return Text(NO_GPU if self.node.heard else "GPUs: not known yet", "dim")
        text = Text()
        for other in self.node.gpus:
            here = other.path == gpu.path
            text.append(f"[{other.ordinal}]" if here else f" {other.ordinal} ", "bold" * here)
        text.append(f"  GPU {gpu.ordinal}: {plain(gpu.name)}", "bold")
        text.append(f"  {plain(gpu.uuid)}", "dim")
        used = f"{human_bytes(self.node.memory_used(gpu))} of {human_bytes(gpu.memory_total)} used"
        seen = self.node.holders(gpu)
        hidden = len({*gpu.pids} - {*gpu.movers} - {process.pid for process in seen})
        own = " and phosd" if gpu.movers else ""
        others = f", {hidden} more that phosd does not show you" if hidden else ""
        text.append(f"\n{used}; processes: {len(seen)}{own}{others}")
        untold = [f.name.lower() for f in FIGURES if not _tells(gpu, f, self.node)]
        if untold:
            text.append(f"; {', '.join(untold)}: n/a, NVML does not tell", "dim")
        return text

    def _share(self, process: Process) -> Cell:
        if len(process.gpus) > 1:
            return f"on {len(process.gpus)} GPUs", "dim"
        gpu = self.gpu
        if gpu is None or not gpu.memory_total:
            return ""
        share = process.device_bytes / gpu.memory_total
        return f"{bar(share, _BAR)} {share:4.0%}"

    # Actions

    def cannot(self, action: Action) -> str:
        if action.id.startswith("gpu(") and len(self.node.gpus) < 2:
            return "there is no other GPU"
        if action.id == "holder" and self.table.current is None:
            return "there is no process"
        if action.id == "evacuate" and not self.table.shown:
            return "no process of yours is on it"
        return ""

    def action_gpu(self, step: int) -> None:
        """Show the next or previous GPU."""
        paths = [gpu.path for gpu in self.node.gpus]
        if self.gpu is not None:
            self._path = paths[(paths.index(self.gpu.path) + step) % len(paths)]
            self.show(self.node)

    def action_figure(self) -> None:
        """Show the next chart, where there is room for only one."""
        self._figure += 1
        self.show(self.node)

    def action_evacuate(self) -> None:
        if self.gpu is not None:
            self.run_worker(evacuate(self, self.gpu), exit_on_error=False)

    def action_holder(self) -> None:
        if self.table.current is not None:
            self.app.push_screen(ProcessScreen(self.table.current))


def _tells(gpu: Gpu, figure: Figure, node: Node) -> bool:
    """Return whether a GPU tells a figure, now or a little while ago."""
    now = Sample(0.0, gpu.utilisation, gpu.memory_used, gpu.temperature, gpu.power)
    samples = (now, *node.samples.get(gpu.path, ()))
    return any(figure.of(sample) is not None for sample in samples)


def _plot(figure: Figure, gpu: Gpu, node: Node) -> Plot:
    now = node.now()
    points = [(sample.time, figure.of(sample)) for sample in node.samples.get(gpu.path, ())]
    known = [value for _, value in points if value is not None]
    told = f"{figure.write(known[-1])}, at most {figure.write(max(known))}" if known else "not yet"
    title = f"{figure.name}: {told}"
    span = (now - _SECONDS, now)
    return Plot(title, points, span, figure.write, figure.most(gpu), _HOLD, "not yet")
