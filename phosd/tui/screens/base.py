"""Provide the base of all screens: frame, actions, and updates of the node."""

from collections.abc import Awaitable
from time import monotonic
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Input

from phosd.client.errors import CommandError
from phosd.client.records import Manager
from phosd.tui.actions import ANYWHERE, MOVE, TABLE, Action, keys_drawn, named, of, why_not
from phosd.tui.host import Host
from phosd.tui.node import Contact, Node
from phosd.tui.widgets.dialogs import Help
from phosd.tui.widgets.frame import Banner, KeyLine, TopLine
from phosd.tui.widgets.table import RecordTable


class NodeScreen(Screen[None]):
    """A screen of the node. ``SCOPE`` names its actions in the table; ``SHOWS`` are the kinds of
    records that it draws: :meth:`show` is called when one of them has changed, and whenever the
    screen comes to the front.
    """

    SCOPE: ClassVar[str]
    TITLE_TEXT: ClassVar[str] = ""
    SHOWS: ClassVar[frozenset[type]] = frozenset()
    app: Host

    # To be overridden

    def body(self) -> ComposeResult:
        """Compose what is between the top line and the line of keys."""
        yield from ()

    def show(self, node: Node) -> None:
        """Draw the present state of the node."""

    def cannot(self, action: Action) -> str:
        """Return why an action does not apply to the chosen rows; an empty string if it does."""
        return ""

    # The frame

    def __init__(self) -> None:
        super().__init__()
        self._in_sight = 0.0
        """When the screen came to the front, on the clock of `time.monotonic`."""

    def compose(self) -> ComposeResult:
        yield TopLine(self.app.current_mode)
        yield Banner()
        yield from self.body()
        yield KeyLine()

    @property
    def framed(self) -> bool:
        """Whether all widgets are mounted, so that the screen can be drawn."""
        whole = bool(self.query(TopLine)) and bool(self.query(KeyLine))
        return whole and all(part.is_mounted for part in self.children)

    @property
    def node(self) -> Node:
        """The mirror of the node."""
        return self.app.node

    def on_mount(self) -> None:
        self.call_later(self.node_changed, self.SHOWS | {Contact})  # may have come too early

    def on_screen_resume(self) -> None:
        self._in_sight = monotonic()
        self.node_changed(self.SHOWS | {Contact})

    def on_resize(self, _: events.Resize) -> None:
        if self.framed:
            self.call_after_refresh(self.node_changed, self.SHOWS | {Contact})

    def node_changed(self, changed: frozenset[type]) -> None:
        """Redraw after a change of these kinds of records."""
        if self.framed:
            self._draw(changed)

    def _draw(self, changed: frozenset[type]) -> None:
        if changed & {Contact, Manager}:
            self.tick()
        if changed & self.SHOWS:
            self.show(self.node)
        self.actions_changed()

    def tick(self) -> None:
        """Redraw what changes with time; called once a second."""
        self.query_one(TopLine).show(self.node)
        self.query_one(Banner).show(self.node)

    # Actions

    @property
    def actions(self) -> list[Action]:
        """The actions available here, the screen's own first."""
        return of(self.SCOPE) + (of(TABLE) if self.query(RecordTable) else []) + of(ANYWHERE)

    def reason(self, action: Action) -> str:
        """Return why an action cannot run now; an empty string if it can."""
        why = why_not(action, self.node, readonly=self.app.readonly)
        return why or (self.cannot(action) if action.scope == self.SCOPE else "")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable unavailable actions: Textual asks before it runs one."""
        found = named(action, self.SCOPE)
        return None if found is not None and self.reason(found) else True

    def actions_changed(self) -> None:
        """Redraw the line of keys after a change of the selection or of the node."""
        shown = [action for action in self.actions if action.shown]
        self.query_one(KeyLine).show([(action, not self.reason(action)) for action in shown])

    def takes(self, key: events.Key) -> bool:
        """Refuse keys pressed before the screen or selection was visible: a key pressed for the
        previous screen neither acts nor leaves this one.
        """
        if isinstance(self.focused, Input):
            return True
        last = len(self.app.screen_stack) == 1
        for action in of(self.SCOPE, ANYWHERE):
            risky = action.acts or (action.id == "leave" and last)
            if risky and key.key in action.key.split(","):
                return self._saw(action, key.time)
        return True

    def _saw(self, action: Action, moment: float) -> bool:
        """Whether the selection was visible when the key was pressed; if not, warn the user."""
        chosen = (table.chosen_since for table in self.query(RecordTable) if action.acts)
        if moment >= max(self._in_sight, *chosen, 0.0):
            return True
        why = "what is in sight has just changed; look, and press it again"
        self.app.tell(f"{action.name}: not done", why, "warning")
        return False

    def on_key(self, event: events.Key) -> None:
        """Explain a key whose action cannot run now."""
        for action in of(self.SCOPE):
            if event.key in action.key.split(",") and self.reason(action):
                event.stop()
                self.do(action)

    def do(self, action: Action) -> None:
        """Run the action, or say why it cannot run."""
        if why := self.reason(action):
            self.app.tell(f"{action.name}: not now", why, "warning")
            return
        place: DOMNode = self
        if action.scope == TABLE:
            place = self.query(RecordTable).first()
        elif action.scope == ANYWHERE:
            place = self.app
        self.call_later(self.app.run_action, action.id, place)

    def on_key_line_pressed(self, event: KeyLine.Pressed) -> None:
        if self._saw(event.action, event.time):
            self.do(event.action)

    def on_record_table_moved(self) -> None:
        self.actions_changed()

    def on_record_table_chosen(self) -> None:
        for action in of(self.SCOPE):
            if action.key == "enter":
                self.do(action)

    def action_help(self) -> None:
        rows = [(keys_drawn(a), a.name, a.help, self.reason(a)) for a in self.actions + of(MOVE)]
        self.app.push_screen(Help(f"{self.TITLE_TEXT}: keys", rows))

    # Calls

    def ask(self, what: str, *work: Awaitable[str | None]) -> None:
        """Await calls of the node in the background, and report how each ended.

        A returned text is shown as the result; a returned job path is watched until the job ends.
        """
        for each in work:
            self.app.run_worker(self._asked(self.node, what, each), exit_on_error=False)

    async def _asked(self, node: Node, what: str, work: Awaitable[str | None]) -> None:
        try:
            told = await work
        except CommandError as error:
            self.app.tell(f"{what}: {error.code}", str(error), "error")
            return
        if told is not None and told.startswith("/org/phos/job/"):
            if node is self.node:  # another one's has the same path, and is another job
                self.app.watch_job(told)
        elif told:
            self.app.tell(what, told)
