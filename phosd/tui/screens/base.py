"""What every screen has: its frame, its actions, and the node's news."""

from collections.abc import Awaitable
from time import monotonic
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Input

from phosd.client.errors import CommandError
from phosd.tui.actions import ANYWHERE, MOVE, TABLE, Action, keys_drawn, named, of, why_not
from phosd.tui.host import Host
from phosd.tui.node import Contact, Node
from phosd.tui.records import Manager
from phosd.tui.widgets.dialogs import Help
from phosd.tui.widgets.frame import Banner, KeyLine, TopLine
from phosd.tui.widgets.table import RecordTable


class NodeScreen(Screen[None]):
    """A screen of the node. ``SCOPE`` is the name of its actions in the table; ``SHOWS`` are the
    kinds of records that it draws: :meth:`show` is called when some of them have changed, and
    whenever the screen comes to the front.
    """

    SCOPE: ClassVar[str]
    TITLE_TEXT: ClassVar[str] = ""
    SHOWS: ClassVar[frozenset[type]] = frozenset()
    app: Host

    # For the screens to fill in

    def body(self) -> ComposeResult:
        """What is between the top line and the keys."""
        yield from ()

    def show(self, node: Node) -> None:
        """Draw what the node is now."""

    def cannot(self, action: Action) -> str:
        """Why an action makes no sense for what is chosen; nothing when it does."""
        return ""

    # The frame

    def __init__(self) -> None:
        super().__init__()
        self._in_sight = 0.0
        """Since when it is in front, on the clock of messages."""

    def compose(self) -> ComposeResult:
        yield TopLine(self.app.current_mode)
        yield Banner()
        yield from self.body()
        yield KeyLine()

    @property
    def framed(self) -> bool:
        """Whether there is something to draw on: not before all is mounted, nor at the end."""
        whole = bool(self.query(TopLine)) and bool(self.query(KeyLine))
        return whole and all(part.is_mounted for part in self.children)

    @property
    def node(self) -> Node:
        """The node."""
        return self.app.node

    def on_mount(self) -> None:
        self.call_later(self.node_changed, self.SHOWS | {Contact})  # it may have been too early

    def on_screen_resume(self) -> None:
        self._in_sight = monotonic()
        self.node_changed(self.SHOWS | {Contact})

    def on_resize(self, _: events.Resize) -> None:
        if self.framed:
            self.call_after_refresh(self.node_changed, self.SHOWS | {Contact})

    def node_changed(self, changed: frozenset[type]) -> None:
        """Something on the node is different."""
        if self.framed:
            self._draw(changed)

    def _draw(self, changed: frozenset[type]) -> None:
        if changed & {Contact, Manager}:
            self.tick()
        if changed & self.SHOWS:
            self.show(self.node)
        self.actions_changed()

    def tick(self) -> None:
        """Once a second: what is told with its age."""
        self.query_one(TopLine).show(self.node)
        self.query_one(Banner).show(self.node)

    # Actions

    @property
    def actions(self) -> list[Action]:
        """What can be done here, the screen's own first."""
        return of(self.SCOPE) + (of(TABLE) if self.query(RecordTable) else []) + of(ANYWHERE)

    def reason(self, action: Action) -> str:
        """Why an action cannot be done now; nothing when it can."""
        why = why_not(action, self.node, readonly=self.app.readonly)
        return why or (self.cannot(action) if action.scope == self.SCOPE else "")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Textual asks before it runs one."""
        found = named(action, self.SCOPE)
        return None if found is not None and self.reason(found) else True

    def actions_changed(self) -> None:
        """Draw the keys anew: something else is chosen, or more or less can be done."""
        shown = [action for action in self.actions if action.shown]
        self.query_one(KeyLine).show([(action, not self.reason(action)) for action in shown])

    def takes(self, key: events.Key) -> bool:
        """Nothing acts on what was not in sight when its key was pressed, and nobody is shown out
        by a key that was meant for another screen.
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
        """Whether what is chosen was in sight at a moment; or else say that it was not."""
        chosen = (table.chosen_since for table in self.query(RecordTable) if action.acts)
        if moment >= max(self._in_sight, *chosen, 0.0):
            return True
        why = "what is in sight has just changed; look, and press it again"
        self.app.tell(f"{action.name}: not done", why, "warning")
        return False

    def on_key(self, event: events.Key) -> None:
        """A key that did nothing: say why if its action cannot be done now."""
        for action in of(self.SCOPE):
            if event.key in action.key.split(",") and self.reason(action):
                event.stop()
                self.do(action)

    def do(self, action: Action) -> None:
        """Do it, or say why not."""
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

    # Work

    def ask(self, what: str, *work: Awaitable[str | None]) -> None:
        """Await calls of the node beside everything else; tell how each ended.

        What one returns is told as its result; the path of a job is watched until it ends.
        """
        for each in work:
            self.app.run_worker(self._asked(what, each), exit_on_error=False)

    async def _asked(self, what: str, work: Awaitable[str | None]) -> None:
        try:
            told = await work
        except CommandError as error:
            self.app.tell(f"{what}: {error.code}", str(error), "error")
            return
        if told is not None and told.startswith("/org/phos/job/"):
            self.app.watch_job(told)
        elif told:
            self.app.tell(what, told)
