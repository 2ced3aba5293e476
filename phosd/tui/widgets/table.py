"""Draw a table of records that stays fast with thousands of rows.

Only visible lines are ever drawn; order and filter are lists of keys. (Textual's own DataTable
measures every cell of every added row, and must be refilled for each filter.)
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from phosd.tui.actions import MOVE, TABLE, bindings
from phosd.tui.text import Cell, fit

_T = TypeVar("_T")
TONES = ("dim", "good", "warn", "bad", "stop", "accent")
_REACTION = 0.5
"""Reaction time in seconds: a key pressed sooner after a change was meant for the old state."""
_LEAST_LAST = 18
"""Least cells of the last column; below that, another column is left out."""
_SPARE_SHARE = 0.5
"""Part of the spare width that columns which may grow take together; the last one has the rest."""


@dataclass(frozen=True)
class Column(Generic[_T]):
    """A column of ``width`` cells; the last column of a table takes the remaining width.

    ``order`` returns the sort key of a record. On a narrow screen the column with the highest
    ``rank`` is left out first; rank 0 always stays. On a wide one a column takes up to ``grow``
    cells more. A ``sparse`` column takes no room while it says nothing of any row.
    """

    title: str
    width: int
    cell: Callable[[_T], Cell]
    order: Callable[[_T], Any]
    right: bool = False
    rank: int = 0
    grow: int = 0
    sparse: bool = False


class RecordTable(ScrollView, Generic[_T], can_focus=True):
    """A table of records by key. Cursor and marks stay with their records when the order
    changes.
    """

    BINDINGS = bindings(TABLE, MOVE)
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "table--head", "table--sorted", "table--cursor", "table--marked",
        *(f"table--{tone}" for tone in TONES),
    }  # fmt: skip
    DEFAULT_CSS = """
    RecordTable {
        height: 1fr;
        overflow-x: hidden;
        background: $surface;
        color: $foreground;
        & .table--head { text-style: bold; background: $panel; color: $foreground; }
        & .table--sorted { text-style: bold underline; background: $panel; color: $foreground; }
        & .table--cursor { background: $surface-lighten-2; }
        &:focus .table--cursor {
            background: $block-cursor-background; color: $block-cursor-foreground;
            text-style: bold;
        }
        & .table--marked { text-style: bold; color: $accent; }
        & .table--dim { text-style: dim; }
        & .table--good { color: $text-success; }
        & .table--warn { color: $text-warning; }
        & .table--bad { color: $text-error; text-style: bold; }
        & .table--stop { color: $text-warning; text-style: bold reverse; }
        & .table--accent { color: $text-accent; }
    }
    """

    cursor: reactive[int] = reactive(0, repaint=False)

    class Moved(Message):
        """The cursor has moved to another record, or to none."""

    class Chosen(Message):
        """The record under the cursor was double-clicked: the same as enter."""

    def __init__(
        self,
        columns: Iterable[Column[_T]],
        *,
        sort: int = 0,
        descending: bool = False,
        steady: bool = True,
        **kwargs: Any,
    ) -> None:
        """``steady``: what the cells of a record say, as far as a filter looks for it, changes only
        with the record.
        """
        super().__init__(**kwargs)
        self._steady = steady
        self._columns = tuple(columns)
        self._records: Mapping[str, _T] = {}
        self._texts: dict[str, tuple[_T, str]] = {}
        self._keys: list[str] = []
        self._silent: frozenset[int] = frozenset()
        """The numbers of the columns that take no room now."""
        self._words: list[str] = []
        self._under = ""
        self.marks: set[str] = set()
        self.chosen_since = 0.0
        """Time from which keys act on the selection, on the clock of `time.monotonic`."""
        self.open_filter: Callable[[], None] = lambda: None
        """Opens the filter; set by the owner of the filter line."""
        self.sort = sort
        self.descending = descending

    # Records

    def show_records(self, records: Mapping[str, _T]) -> None:
        """Replace the records.

        An empty update keeps the marks and the cursor's record: a phosd that has just started lists
        nothing before its first scan.
        """
        before = self.marks or {self._under}
        emptied = bool(self._records) and not records
        self._records = dict(records)  # a copy: the node's dict changes before the next drawing
        if records:
            self.marks &= records.keys()
        self._arrange()
        if emptied:
            self._tell_moved()
        if not (self.marks or {self._under}) <= before:  # not what the user selected
            self.chosen_since = monotonic() + (_REACTION if before != {""} else 0.0)

    @property
    def current(self) -> _T | None:
        """The record under the cursor."""
        return self._records.get(self._under)

    @property
    def chosen(self) -> list[_T]:
        """The marked records in table order; without marks, the one under the cursor."""
        marked = [self._records[key] for key in self._keys if key in self.marks]
        return marked or [record for record in [self.current] if record is not None]

    @property
    def shown(self) -> int:
        """Number of rows after filtering."""
        return len(self._keys)

    def set_filter(self, text: str) -> None:
        """Show only records whose cells contain all these words."""
        self._words = text.casefold().split()
        self._arrange()

    def move_to(self, key: str) -> None:
        """Move the cursor to a record, if it is shown."""
        if key in self._keys:
            self._under = key
            self._follow()

    def _arrange(self) -> None:
        order = self._columns[self.sort].order
        records = self._records
        keys = [key for key in records if self._matches(key)] if self._words else list(records)
        keys.sort()  # for a stable order of equals
        keys.sort(key=lambda key: order(records[key]), reverse=self.descending)
        self._keys = keys
        self._silent = frozenset(
            number
            for number, column in enumerate(self._columns)
            if column.sparse and not any(column.cell(records[key]) for key in keys)
        )
        self._texts = {key: text for key, text in self._texts.items() if key in records}
        size = Size(self.size.width, len(keys) + 1)
        if size != self.virtual_size:
            self.virtual_size = size
        self._follow(scroll=False)
        self.refresh()

    def _matches(self, key: str) -> bool:
        record = self._records[key]
        known = self._texts.get(key)
        if known is None or known[0] is not record or not self._steady:
            cells = (column.cell(record) for column in self._columns)
            text = "\n".join(c if isinstance(c, str) else c[0] for c in cells).casefold()
            known = self._texts[key] = (record, text)
        return all(word in known[1] for word in self._words)

    # The cursor

    def _tell_moved(self) -> None:
        """Post that the cursor has moved. The sender is the table in any case: a message that a
        handler of the listing around it has caused would otherwise end there.
        """
        moved = self.Moved()
        moved.set_sender(self)
        self.post_message(moved)

    def _follow(self, *, scroll: bool = True) -> None:
        """Keep the cursor on its record after a change of order, or else at its row."""
        if not self._records:
            return
        before = self._under
        if self._under in self._records and self._under in self._keys:
            self.cursor = self._keys.index(self._under)
        else:
            self.cursor = max(0, min(self.cursor, len(self._keys) - 1))
            self._under = self._keys[self.cursor] if self._keys else ""
        if scroll:
            self._scroll_to_cursor()
        if self._under != before:
            self._tell_moved()
        self.refresh()

    def _go(self, row: int) -> None:
        if self._keys:
            self._under = ""
            self.cursor = max(0, min(row, len(self._keys) - 1))
            self._follow()
            self._tell_moved()

    def _scroll_to_cursor(self) -> None:
        page = max(1, self.size.height - 1)
        top = round(self.scroll_y)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + page:
            self.scroll_to(y=self.cursor - page + 1, animate=False)

    def on_click(self, event: events.Click) -> None:
        line = event.get_content_offset(self)
        if line is None:
            return
        if line.y == 0:
            self._sort_at(line.x)
            return
        row = line.y - 1 + round(self.scroll_y)
        if row < len(self._keys):
            again = row == self.cursor and event.chain > 1
            self._go(row)
            if again:
                self.post_message(self.Chosen())

    # Actions

    def action_move(self, where: str) -> None:
        page = max(1, self.size.height - 2)
        steps = {"up": -1, "down": 1, "page_up": -page, "page_down": page}
        ends = {"first": 0, "last": len(self._keys) - 1}
        self._go(ends[where] if where in ends else self.cursor + steps[where])

    def action_mark(self) -> None:
        if self._under in self._records:
            self.marks ^= {self._under}
            self._go(self.cursor + 1)

    def action_unmark(self) -> None:
        self.marks.clear()
        self._tell_moved()
        self.refresh()

    def action_order(self) -> None:
        self._sort_by((self.sort + 1) % len(self._columns), descending=False)

    def action_reverse(self) -> None:
        self._sort_by(self.sort, descending=not self.descending)

    def action_filter(self) -> None:
        self.open_filter()

    def _sort_by(self, column: int, *, descending: bool) -> None:
        self.sort, self.descending = column, descending
        self._arrange()
        self._scroll_to_cursor()

    def _sort_at(self, x: int) -> None:
        left = 2
        for index, width in self._layout(self.size.width):
            if left <= x < left + width:
                self._sort_by(index, descending=index == self.sort and not self.descending)
            left += width + 1

    # Drawing

    def on_resize(self, event: events.Resize) -> None:
        self.virtual_size = Size(event.size.width, len(self._keys) + 1)
        self.call_after_refresh(self._scroll_to_cursor)

    def _layout(self, width: int) -> list[tuple[int, int]]:
        """Return number and width of the columns that fit."""
        kept = self._kept(width)
        *others, last = kept
        widths = {i: self._columns[i].width for i in others}
        left = width - 2 - sum(cells + 1 for cells in widths.values())
        spare = int((left - _LEAST_LAST) * _SPARE_SHARE)
        for i in others:
            more = max(0, min(self._columns[i].grow, spare))
            widths[i] += more
            spare -= more
            left -= more
        return [*widths.items(), (last, max(1, left))]

    def _kept(self, width: int) -> list[int]:
        """Return the numbers of the columns that have room, and leave enough to the last one."""
        kept = [i for i in range(len(self._columns)) if i not in self._silent]

        def left() -> int:
            return width - 2 - sum(self._columns[i].width + 1 for i in kept[:-1])

        while left() < _LEAST_LAST:
            candidates = [i for i in kept if self._columns[i].rank]
            if not candidates:
                break
            kept.remove(max(candidates, key=lambda i: (self._columns[i].rank, i)))
        return kept

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base = self.rich_style
        if y == 0:
            segments = self._head(width)
        else:
            row = y - 1 + round(self.scroll_y)
            segments = self._row(row, width, base) if row < len(self._keys) else []
        return Strip(segments).adjust_cell_length(width, base)

    def _head(self, width: int) -> list[Segment]:
        style, sorted_style = self._style("table--head"), self._style("table--sorted")
        segments = [Segment("  ", style)]
        for index, cells in self._layout(width):
            column = self._columns[index]
            here = index == self.sort
            title = column.title + (("▼" if self.descending else "▲") if here else "")
            text = fit(title, cells, right=column.right)
            segments += [Segment(text, sorted_style if here else style), Segment(" ", style)]
        return segments

    def _row(self, row: int, width: int, base: Style) -> list[Segment]:
        key = self._keys[row]
        record = self._records[key]
        marked, under = key in self.marks, row == self.cursor
        if marked:
            base += self._style("table--marked", partial=True)
        over = self._style("table--cursor", partial=True) if under else Style()
        sign = ("▶" if under else " ") + ("*" if marked else " ")
        segments = [Segment(sign, base + over)]
        for index, cells in self._layout(width):
            column = self._columns[index]
            cell = column.cell(record)
            text, tone = (cell, "") if isinstance(cell, str) else cell
            style = base + self._style(f"table--{tone}", partial=True) if tone else base
            shown = fit(text, cells, right=column.right)
            segments += [Segment(shown, style + over), Segment(" ", base + over)]
        return segments

    def _style(self, name: str, *, partial: bool = False) -> Style:
        return self.get_component_rich_style(name, partial=partial)
