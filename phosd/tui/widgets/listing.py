"""Show a table with a filter line."""

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Input, Static

from phosd.tui.text import plain
from phosd.tui.widgets.table import RecordTable

_T = TypeVar("_T")
UNKNOWN = "nothing is known yet: phosd has not answered"


class _Words(Input):
    """The filter input of a listing. Its bindings have priority, so that no later key is lost to
    it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "keep", "Keep", priority=True),
        Binding("escape", "all", "All", priority=True),
    ]

    def __init__(self, listing: "Listing[Any]") -> None:
        hint = "words that a row must have; enter keeps them, esc shows all"
        super().__init__(placeholder=hint, compact=True)
        self._listing = listing

    def action_keep(self) -> None:
        self._listing.close_filter()

    def action_all(self) -> None:
        self._listing.show_all()


class Listing(Vertical, Generic[_T]):
    """A :class:`RecordTable` with its number of rows, and a filter that appears on demand."""

    DEFAULT_CSS = """
    Listing { height: 1fr; }
    Listing > .listing--filter { height: 1; display: none; }
    Listing > .listing--filter.-open { display: block; }
    Listing > .listing--filter Static { width: 3; padding: 0 1; text-style: bold; }
    Listing _Words { height: 1; }
    Listing > .listing--count { height: 1; color: $text-muted; padding: 0 1; }
    """

    def __init__(self, table: RecordTable[_T], nothing: str, **kwargs: Any) -> None:
        """Show ``nothing`` as long as there is no record at all."""
        super().__init__(**kwargs)
        self.table = table
        self._nothing = nothing
        self._all = 0
        self._counted = ""

    def compose(self) -> ComposeResult:
        yield self.table
        yield Static("", classes="listing--count", markup=False)
        with Horizontal(classes="listing--filter"):
            yield Static("/")
            yield _Words(self)

    def on_mount(self) -> None:
        self.table.open_filter = self.open_filter
        self._count()

    def say(self, nothing: str) -> None:
        """Change the text that is shown when there is no record."""
        self._nothing = nothing
        self._count()

    def show_records(self, records: Mapping[str, _T]) -> None:
        """Replace the records."""
        self._all = len(records)
        self.table.show_records(records)
        self._count()

    def open_filter(self) -> None:
        """Open the filter input; the next key goes to it."""
        self._show_filter(True)
        self.screen.set_focus(self.query_one(_Words))

    @on(Input.Changed)
    def _narrow(self, event: Input.Changed) -> None:
        event.stop()
        self.table.set_filter(event.value)
        self._count()

    def close_filter(self) -> None:
        """Return the focus to the table; the filter stays visible unless it is empty."""
        words = self.query_one(_Words)
        self.table.set_filter(words.value)
        self._count()
        self.screen.set_focus(self.table)
        self._show_filter(bool(words.value))

    def _show_filter(self, there: bool) -> None:
        self.query_one(".listing--filter").set_class(there, "-open")

    @on(RecordTable.Moved)
    def _count(self) -> None:
        marked = len(self.table.marks) if self._all else 0
        shown = self.table.shown
        if not self._all:
            text = self._nothing
        elif shown < self._all:
            text = f"{shown} of {self._all} rows"
        else:
            text = f"{shown} rows" if shown != 1 else "1 row"
        text = plain(text) + (f", {marked} marked" if marked else "")
        if text != self._counted:
            self._counted = text
            self.query_one(".listing--count", Static).update(text, layout=False)

    def key_escape(self, event: events.Key) -> None:
        """Show all rows; if they are shown, the key means what it means elsewhere."""
        if self.show_all():
            event.stop()

    def show_all(self) -> bool:
        """Clear the filter and all marks; return whether there were any."""
        words = self.query_one(_Words)
        there = bool(words.value or self.table.marks)
        words.value = ""
        self.close_filter()
        self.table.action_unmark()
        return there
