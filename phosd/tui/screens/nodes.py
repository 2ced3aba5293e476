"""Show several nodes, those that need somebody first."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from textual.app import ComposeResult
from textual.widgets import Static

from phosd.protection import Protection, running
from phosd.tui.actions import bindings
from phosd.tui.node import Contact, Node
from phosd.tui.programs import Programs, headline
from phosd.tui.screens.base import NodeScreen
from phosd.tui.text import Cell, human_bytes, plain, since
from phosd.tui.widgets.frame import TopLine
from phosd.tui.widgets.listing import Listing
from phosd.tui.widgets.node_line import disk_cell
from phosd.tui.widgets.table import Column, RecordTable
from phosd.units import counted

_REDRAW_SECONDS = 0.5
_NEEDS = 2
"""Number of the column by which the table is sorted at first."""


@dataclass(frozen=True)
class NodeRow:
    """A node, and how well its programs are protected."""

    node: Node
    programs: Programs

    @property
    def troubles(self) -> list[str]:
        """What is wrong with the node itself."""
        if self.node.contact is Contact.GONE:
            return [self.node.trouble]
        return list(self.node.manager.troubles)


class NodesScreen(NodeScreen):
    """All nodes. It is redrawn twice a second, however many there are."""

    SCOPE = "fleet"
    TITLE_TEXT = "Nodes"
    BINDINGS = bindings("fleet")
    DEFAULT_CSS = """
    NodesScreen .about { height: auto; max-height: 4; padding: 0 1; color: $text-muted; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[str, NodeRow] = {}

    def body(self) -> ComposeResult:
        self._rows = {
            str(number): NodeRow(node, Programs()) for number, node in enumerate(self.app.nodes)
        }
        yield Listing(RecordTable(_columns(), sort=_NEEDS, steady=False), "no nodes")
        yield Static(classes="about", markup=False)

    @property
    def table(self) -> RecordTable[NodeRow]:
        """The table of nodes."""
        return self.query_one(RecordTable)

    def on_mount(self) -> None:
        super().on_mount()
        self.set_interval(_REDRAW_SECONDS, self._redraw)

    def _redraw(self) -> None:
        if self.is_current and self.framed:
            self._show_rows()

    def tick(self) -> None:
        there = sum(row.node.contact is Contact.HERE for row in self._rows.values())
        readonly = " readonly" if self.app.readonly else ""
        nodes = f"{there} of {counted(len(self._rows), 'node')}"
        self.query_one(TopLine).say(nodes + readonly, readonly.strip() or nodes)
        self._show_rows(again=True)

    def show(self, node: Node) -> None:
        self._show_rows()

    def _show_rows(self, *, again: bool = False) -> None:
        """Redraw them; ``again``: time has passed, which may make programs late."""
        for row in self._rows.values():
            row.programs.look(row.node, again=again)
        self.query_one(Listing).show_records(self._rows)
        self._show_about()

    def _show_about(self) -> None:
        """Show what is wrong with the chosen node."""
        row = self.table.current
        place = self.query_one(".about", Static)
        place.display = row is not None and bool(row.troubles)
        if row is not None:
            place.update(plain("; ".join(row.troubles)))

    def on_record_table_moved(self) -> None:
        super().on_record_table_moved()
        self._show_about()

    async def action_open_node(self) -> None:
        row = self.table.current
        if row is not None:
            await self.app.open_node(row.node)


def _columns() -> list[Column[NodeRow]]:
    return [
        Column("NODE", 12, lambda row: plain(row.node.name), lambda row: row.node.name, grow=20),
        Column("PHOSD", 9, _contact, lambda row: row.node.contact.value, rank=2),
        Column("PROTECTED", 30, _protection, _needs, grow=20),
        Column("PROGRAMS", 8, _number(lambda row: running(row.programs.all)),
               lambda row: running(row.programs.all), right=True, rank=6),
        Column("GPUS", 4, _number(lambda row: len(row.node.gpus)), lambda row: len(row.node.gpus),
               right=True, rank=5),
        Column("LOAD", 5, _load, _load, right=True, rank=3),
        Column("MEMORY", 24, _memory, lambda row: sum(map(row.node.memory_used, row.node.gpus)),
               right=True, rank=4),
        Column("JOBS", 4, _number(lambda row: len(row.node.active_jobs)),
               lambda row: len(row.node.active_jobs), right=True, rank=7),
        Column("FAILED IN 24 H", 14, _failures, lambda row: row.node.failures, right=True, rank=8),
        Column("DISK", 28, _disk, lambda row: row.node.storage.share if row.node.storage else 0.0,
               rank=9),
        Column("TROUBLE", 0, _trouble, lambda row: row.troubles, rank=1),
    ]  # fmt: skip


def _number(count: Callable[[NodeRow], int]) -> Callable[[NodeRow], str]:
    """Return the cell with a number of things, as far as the node has ever told it."""
    return lambda row: str(count(row)) if row.node.heard else ""


def _contact(row: NodeRow) -> Cell:
    node = row.node
    if node.contact is Contact.HERE:
        return f"● {plain(node.manager.version)}", "good"
    age = since(node.since, node.now())
    return (f"◌ {age}", "warn") if node.contact is Contact.SEEKING else (f"✗ {age}", "bad")


def _needs(row: NodeRow) -> tuple[int, list[int]]:
    """Return the place of a node in the order of those that need somebody."""
    counts = Counter(each.protection for each in row.programs.all)
    return row.node.contact is Contact.HERE, [-counts[kind] for kind in Protection]


def _protection(row: NodeRow) -> Cell:
    if row.node.contact is Contact.GONE:
        return "✗ no phosd", "bad"
    if not row.node.heard:
        return ""
    found = headline(row.programs.all)
    if not found:
        return "no programs", "dim"
    return "  ".join(text for text, _ in found), found[0][1]


def _memory(row: NodeRow) -> Cell:
    gpus = row.node.gpus
    used, total = sum(map(row.node.memory_used, gpus)), sum(gpu.memory_total for gpu in gpus)
    return f"{human_bytes(used)} of {human_bytes(total)}" if gpus else ""


def _load(row: NodeRow) -> str:
    loads = [gpu.utilisation for gpu in row.node.gpus if gpu.utilisation is not None]
    return f"{sum(loads) / len(loads):.0%}" if loads else ""


def _disk(row: NodeRow) -> Cell:
    storage = row.node.storage
    return disk_cell(storage) if storage is not None and storage.total else ""


def _failures(row: NodeRow) -> Cell:
    if not row.node.heard:
        return ""
    return (f"✗ {row.node.failures}", "bad") if row.node.failures else ("0", "dim")


def _trouble(row: NodeRow) -> Cell:
    return (plain("; ".join(row.troubles)), "bad") if row.troubles else ""
