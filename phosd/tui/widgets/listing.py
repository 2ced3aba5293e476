"""A table with a line to filter it by."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Input, Static

from phosd.tui.text import plain
from phosd.tui.widgets.table import RecordTable

_T = TypeVar("_T")


class Listing(Vertical, Generic[_T]):
    """A :class:`RecordTable`, how many rows it has, and the filter, which appears when wanted."""

    DEFAULT_CSS = """
    Listing { height: 1fr; }
    Listing > Input { display: none; height: 1; padding: 0 1; }
    Listing.-filtering > Input { display: block; }
    Listing > .listing--count { height: 1; color: $text-muted; padding: 0 1; }
    """

    def __init__(self, table: RecordTable[_T], nothing: str, **kwargs: Any) -> None:
        """``nothing`` is said when there is no record at all."""
        super().__init__(**kwargs)
        self.table = table
        self._nothing = nothing
        self._all = 0
        self._counted = ""

    def compose(self) -> ComposeResult:
        yield self.table
        yield Static("", classes="listing--count", markup=False)
        hint = "words that a row must have; enter keeps them, esc shows all"
        yield Input(placeholder=hint, compact=True)

    def on_mount(self) -> None:
        self._count()

    def say(self, nothing: str) -> None:
        """What to say from now on when there is no record."""
        self._nothing = nothing
        self._count()

    def show_records(self, records: Mapping[str, _T]) -> None:
        """Show these from now on."""
        self._all = len(records)
        self.table.show_records(records)
        self._count()

    @on(RecordTable.WantsFilter)
    def _open(self) -> None:
        self.add_class("-filtering")
        self.query_one(Input).focus()

    @on(Input.Changed)
    def _narrow(self, event: Input.Changed) -> None:
        event.stop()
        self.table.set_filter(event.value)
        self._count()

    @on(Input.Submitted)
    def _keep(self, event: Input.Submitted) -> None:
        event.stop()
        self.table.focus()
        if not event.value:
            self.remove_class("-filtering")

    @on(RecordTable.Moved)
    def _count(self) -> None:
        marked = len(self.table.marks)
        shown = self.table.shown
        if not self._all:
            text = self._nothing
        elif shown < self._all:
            text = f"{shown} of {self._all}"
        else:
            text = f"{shown}"
        text = plain(text) + (f", {marked} marked" if marked else "")
        if text != self._counted:
            self._counted = text
            self.query_one(".listing--count", Static).update(text, layout=False)

    def key_escape(self) -> None:
        """All rows again, no marks."""
        field = self.query_one(Input)
        field.value = ""
        self.remove_class("-filtering")
        self.table.action_unmark()
        self.table.focus()
