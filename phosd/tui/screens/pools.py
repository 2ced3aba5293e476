"""Show the pools: how many programs wait and run, and what keeps one from being filled."""

from textual.app import ComposeResult
from textual.widgets import Static

from phosd.client.records import Image, Pool
from phosd.client.text import full_text
from phosd.tui.actions import Action, bindings
from phosd.tui.node import Node
from phosd.tui.screens import pool_work
from phosd.tui.screens.base import NodeScreen
from phosd.tui.text import Cell, command_line, plain
from phosd.tui.widgets.listing import UNKNOWN, Listing
from phosd.tui.widgets.table import Column, RecordTable


class PoolsScreen(NodeScreen):
    """The pools, those in trouble first."""

    SCOPE = "pools"
    TITLE_TEXT = "Pools"
    SHOWS = frozenset({Pool, Image})
    BINDINGS = bindings("pools")
    DEFAULT_CSS = """
    PoolsScreen .about { height: auto; max-height: 3; padding: 0 1; color: $text-muted; }
    """

    def body(self) -> ComposeResult:
        columns: list[Column[Pool]] = [
            Column("NAME", 12, lambda p: plain(p.name), lambda p: p.name, grow=16),
            Column("USER", 8, lambda p: plain(p.owner_name), lambda p: p.owner_name, rank=3),
            Column("IMAGE", 22, self._image_cell, lambda p: p.image, rank=2, grow=10),
            Column("WAITING", 9, _waiting_cell, lambda p: p.waiting - p.hollow - p.ready),
            Column("READY", 8, _ready_cell, lambda p: p.waiting_ready - p.ready, rank=1),
            Column("RUNNING", 8, lambda p: str(p.running), lambda p: p.running, right=True),
            Column("MAX", 5, lambda p: str(p.max), lambda p: p.max, right=True, rank=4),
            Column("TROUBLE", 0, _trouble_cell, lambda p: (not p.trouble, p.name)),
        ]  # fmt: skip
        yield Listing(RecordTable(columns, sort=7), UNKNOWN)
        yield Static(classes="about", markup=False)

    @property
    def table(self) -> RecordTable[Pool]:
        """The table of pools."""
        return self.query_one(RecordTable)

    def show(self, node: Node) -> None:
        nothing = "no pools yet; `M` on an image makes one"
        listing = self.query_one(Listing)
        listing.say(nothing if node.heard else UNKNOWN)
        listing.show_records(node.of(Pool))
        self._show_about()

    def _show_about(self) -> None:
        """Show what does not fit into the row."""
        pool = self.table.current
        parts = []
        if pool is not None:
            if pool.trouble:
                parts.append(pool.trouble)
            if (image := self.node.image(pool.image)) is not None:
                parts.append(command_line(image.command))
        place = self.query_one(".about", Static)
        place.display = bool(parts)
        place.update(plain("; ".join(parts)))

    def on_record_table_moved(self) -> None:
        self._show_about()

    def _image_cell(self, pool: Pool) -> Cell:
        image = self.node.image(pool.image)
        if image is not None and image.name:
            return plain(f"{image.name}@{image.number}")
        return plain(pool.image)

    # Actions

    def cannot(self, action: Action) -> str:
        return "" if self.table.chosen else "there is no pool"

    def action_start_pooled(self) -> None:
        for pool in self.table.chosen:
            self.ask(f"Start {pool.name}", self.node.call("StartPooled", pool.name))

    def action_scale_pool(self) -> None:
        if self.table.current is not None:
            pool_work.scale(self, self.table.current)

    def action_remove_pool(self) -> None:
        pool_work.remove(self, self.table.chosen)


def _waiting_cell(pool: Pool) -> Cell:
    wanted = pool.hollow + pool.ready
    return f"{pool.waiting} of {wanted}", "warn" if pool.waiting < wanted else ""


def _ready_cell(pool: Pool) -> Cell:
    if not pool.ready:
        return ""
    return f"{pool.waiting_ready} of {pool.ready}", "warn" * (pool.waiting_ready < pool.ready)


def _trouble_cell(pool: Pool) -> Cell:
    if pool.trouble:
        return plain(pool.trouble), "bad"
    wanted = pool.hollow + pool.ready
    counts = {"waiting": pool.waiting, "running": pool.running}
    full = full_text(wanted=wanted, most=pool.max, **counts)
    return (full, "dim") if full else ""
