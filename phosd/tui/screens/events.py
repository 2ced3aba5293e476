"""Show the event log, newest first."""

from textual.app import ComposeResult
from textual.widgets import Static

from phosd.client.errors import CommandError
from phosd.client.past import Event, event
from phosd.client.records import Manager
from phosd.tui.actions import bindings
from phosd.tui.node import Contact, Node, Noted
from phosd.tui.past import SEVERITIES
from phosd.tui.screens.base import NodeScreen
from phosd.tui.screens.reading import Reading
from phosd.tui.text import plain, when
from phosd.tui.widgets.listing import Listing
from phosd.tui.widgets.table import Column, RecordTable

_AT_ONCE = 1_000
"""Most events per call."""
_MOST = 2_000
"""Most events to keep."""
_SIGNS = {
    "info": ("· info", ""),
    "warning": ("! warning", "warn"),
    "error": ("✗ ERROR", "bad"),
}


class EventsScreen(NodeScreen):
    """The events that the user may see."""

    SCOPE = "events"
    TITLE_TEXT = "Log"
    SHOWS = frozenset({Noted, Manager, Contact})
    BINDINGS = bindings("events")
    DEFAULT_CSS = """
    EventsScreen .about { height: auto; max-height: 8; padding: 0 1; background: $boost; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._reading = Reading(self, self._read)
        self._events: dict[str, Event] = {}
        self._least = 0
        self._trouble = ""

    def body(self) -> ComposeResult:
        columns: list[Column[Event]] = [
            Column("TIME", 19, lambda e: when(e.time), lambda e: e.number),
            Column("SEVERITY", 9, lambda e: _SIGNS.get(e.severity, plain(e.severity)),
                   lambda e: _rank(e.severity)),
            Column("KIND", 16, lambda e: plain(e.kind), lambda e: e.kind, rank=2),
            Column("ABOUT", 12, lambda e: plain(e.subject), lambda e: e.subject, rank=1),
            Column("WHAT", 0, lambda e: plain(e.text), lambda e: e.text),
        ]  # fmt: skip
        yield Listing(RecordTable(columns, descending=True), "not asked yet")
        yield Static(classes="about", markup=False)

    @property
    def table(self) -> RecordTable[Event]:
        """The table of events."""
        return self.query_one(RecordTable)

    @property
    def _offered(self) -> bool:
        return "events" in self.node.manager.features

    # Drawing

    def node_changed(self, changed: frozenset[type]) -> None:
        super().node_changed(changed)
        if self.framed and changed & {Noted, Manager} and self._offered:
            self._reading.want()

    async def _read(self) -> None:
        """Read the events since the latest known one; after a long pause some may be missing."""
        if self.node.contact is not Contact.HERE:
            return
        latest = max((e.time for e in self._events.values()), default=0.0)
        try:
            rows = await self.node.call("ListEvents", limit=_AT_ONCE, since=int(latest * 1e6))
        except CommandError as error:
            self._trouble = f"{error.code}: {error}"
        else:
            self._trouble = ""
            found = [event(row) for row in rows]
            known = self._events | {f"{each.number:020}": each for each in found}
            self._events = {key: known[key] for key in sorted(known)[-_MOST:]}
        self.show(self.node)

    def show(self, node: Node) -> None:
        shown = {k: e for k, e in self._events.items() if _rank(e.severity) >= self._least}
        listing = self.query_one(Listing)
        listing.say(self._nothing())
        listing.show_records(shown)
        self._show_about()

    def _nothing(self) -> str:
        if self._trouble:
            return self._trouble
        if not self._offered and self.node.contact is Contact.HERE:
            return "this phosd does not tell what it notes; `journalctl -u phosd` does"
        least = SEVERITIES[self._least]
        return "nothing was noted" if not self._least else f"nothing of severity {least} was noted"

    def _show_about(self) -> None:
        """Show the full text: the row shows only the beginning."""
        current = self.table.current
        least = f"only {SEVERITIES[self._least]} and worse (s). " if self._least else ""
        trouble = f"{self._trouble}. " if self._trouble and current is not None else ""
        text = f"{trouble}{least}{current.text if current is not None else ''}"
        place = self.query_one(".about", Static)
        place.display = bool(text)
        place.update(plain(text))

    def on_record_table_moved(self) -> None:
        self._show_about()

    # Actions

    def action_severity(self) -> None:
        """Raise the least severity shown; after the highest, show everything again."""
        self._least = (self._least + 1) % len(SEVERITIES)
        self.show(self.node)

    def action_read_events(self) -> None:
        """Read the events again."""
        self._reading.want()


def _rank(severity: str) -> int:
    """Return the rank of a severity. Unknown severities count as errors, so that nobody misses
    them.
    """
    return SEVERITIES.index(severity) if severity in SEVERITIES else len(SEVERITIES)
