"""Processes, the home screen: the GPUs, and who uses them."""

from textual.app import ComposeResult

from phosd.tui.actions import Action, bindings
from phosd.tui.node import Node
from phosd.tui.records import Gpu, Image, Job, Process
from phosd.tui.screens.base import NodeScreen
from phosd.tui.text import command_line, human_bytes, plain, since
from phosd.tui.widgets.listing import Listing
from phosd.tui.widgets.table import Cell, Column, RecordTable


class ProcessesScreen(NodeScreen):
    """The GPU processes of the node."""

    SCOPE = "processes"
    TITLE_TEXT = "Processes"
    SHOWS = frozenset({Process, Gpu, Job, Image})
    BINDINGS = bindings("processes")

    def body(self) -> ComposeResult:
        columns: list[Column[Process]] = [
            Column("PID", 8, lambda p: str(p.pid), lambda p: p.pid, right=True),
            Column("MEMORY", 10, lambda p: human_bytes(p.device_bytes), lambda p: p.device_bytes,
                   right=True),
            Column("COMMAND", 0, lambda p: command_line(p.command), lambda p: p.command),
        ]  # fmt: skip
        yield Listing(RecordTable(columns, classes="-table"), "no GPU processes")

    @property
    def _table(self) -> RecordTable[Process]:
        return self.query_one(RecordTable)

    def show(self, node: Node) -> None:
        self.query_one(Listing).show_records(node.of(Process))

    def cannot(self, action: Action) -> str:
        return "" if self.is_mounted and self._table.chosen else "there is no process"

    def action_checkpoint(self) -> None:
        for process in self._table.chosen:
            self.ask(f"Checkpoint of {process.pid}", self.node.checkpoint(process.pid))


__all__ = ["Cell", "ProcessesScreen", "plain", "since"]
