"""Run the application: its screens, and what they share."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, ClassVar

from textual import events
from textual.app import ScreenStackError
from textual.binding import Binding, BindingType
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input

from phosd.client.records import Job, Manager
from phosd.tui.actions import ANYWHERE, bindings
from phosd.tui.host import Host, Severity
from phosd.tui.keys import Keys
from phosd.tui.node import Contact, Node
from phosd.tui.screens.base import NodeScreen
from phosd.tui.screens.events import EventsScreen
from phosd.tui.screens.gpus import GpusScreen
from phosd.tui.screens.history import HistoryScreen
from phosd.tui.screens.images import ImagesScreen
from phosd.tui.screens.jobs import JobsScreen
from phosd.tui.screens.pools import PoolsScreen
from phosd.tui.screens.processes import ProcessesScreen
from phosd.tui.text import cause, plain, seconds
from phosd.tui.widgets.job import result_text

SCREENS: tuple[type[NodeScreen], ...] = (
    ProcessesScreen,
    JobsScreen,
    ImagesScreen,
    HistoryScreen,
    GpusScreen,
    EventsScreen,
    PoolsScreen,
)
"""The screens in the order of their number keys."""
_TOAST_SECONDS: dict[Severity, float] = {"information": 6, "warning": 8, "error": 15}
_TOASTS_A_SECOND = 8
"""Users cannot read more; one toast then says how many were suppressed."""
_ROOM_FOR_BOTH = 16
"""Lines of a terminal from which there is room for the banner and for toasts."""
_SAMPLE_SECONDS = 2.0
_SURVEY_SECONDS = 30.0


class Palette(Provider):
    """The actions of the screen in the command palette; unavailable ones say why."""

    async def discover(self) -> Hits:
        for display, run, text, about in self._entries():
            yield DiscoveryHit(display, run, text, about)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for display, run, text, about in self._entries():
            if (score := matcher.match(text)) > 0:
                shown = display if display.spans else matcher.highlight(text)
                yield Hit(score, shown, run, text, about)

    def _entries(self) -> list[tuple[Content, Callable[[], object], str, str]]:
        screen, app = self.screen, self.app
        assert isinstance(app, PhosApp)
        entries: list[tuple[Content, Callable[[], object], str, str]] = []
        if isinstance(screen, NodeScreen):
            for action in screen.actions:
                why = screen.reason(action)
                text = f"{action.name} ({action.scope})"
                display = Content.styled(text, "dim") if why else Content(text)
                about = f"not now: {why}" if why else action.help
                entries.append((display, partial(screen.do, action), text, about))
        for name, title in app.titles.items():
            text = f"Screen: {title}"
            entries.append((Content(text), partial(app.switch_mode, name), text, "go there"))
        return entries


class PhosApp(Host):
    """The application phos-tui."""

    TITLE = "phos-tui"
    COMMANDS = {Palette}  # noqa: RUF012 - as Textual types it
    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(ANYWHERE),
        *(
            Binding(str(number), f"go('{screen.SCOPE}')", screen.TITLE_TEXT, priority=True)
            for number, screen in enumerate(SCREENS, 1)
        ),
    ]
    MODES: ClassVar[dict[str, str | Callable[[], Screen[Any]]]] = {s.SCOPE: s for s in SCREENS}
    DEFAULT_MODE = SCREENS[0].SCOPE
    titles: ClassVar[dict[str, str]] = {screen.SCOPE: screen.TITLE_TEXT for screen in SCREENS}

    def __init__(self, node: Node, *, readonly: bool = False, light: bool = False) -> None:
        super().__init__()
        self.node = node
        self.readonly = readonly
        self._watched: set[str] = set()
        self._contact = Contact.SEEKING
        self._toasts: list[float] = []
        self._untold = 0
        self._light = light
        self.keys = Keys(self, super().on_event)

    async def on_event(self, event: events.Event) -> None:
        if isinstance(event, events.Key) and not event.is_forwarded:
            self.keys.put(event)
        else:
            await super().on_event(event)

    def clear_selection(self) -> None:
        """Do what Textual does, if there is a screen. An entry calls this when it is made; where
        tasks begin at once (Python 3.12 and newer) the first screen is not there yet.
        """
        with suppress(ScreenStackError):
            super().clear_selection()

    def on_mount(self) -> None:
        self.theme = "textual-light" if self._light else "textual-dark"
        for node in self.nodes:
            node.subscribe(partial(self._heard_of, node))
            node.start()
            self._survey(node)
            self.set_interval(_SAMPLE_SECONDS, node.sample)
            self.set_interval(_SURVEY_SECONDS, partial(self._survey, node))
        self.run_worker(self.keys.work())
        self.set_interval(1.0, self._tick)

    def on_unmount(self) -> None:
        for node in self.nodes:
            node.stop()

    def _heard_of(self, node: Node, changed: frozenset[type]) -> None:
        if Manager in changed and node.contact is Contact.HERE:
            self.run_worker(node.recall(), exclusive=True, group=f"recall {id(node)}")
            self._survey(node)
        if node is self.node:
            self._node_changed(changed)

    def _node_changed(self, changed: frozenset[type]) -> None:
        before, self._contact = self._contact, self.node.contact
        if self._contact is Contact.HERE and before is not Contact.HERE:
            self._tell_lost()
        if self._contact is Contact.GONE and before is not Contact.GONE and self._crowded:
            self.clear_notifications()
        if Job in changed:
            self._tell_ended()
        for screen in self.screen_stack:
            if (take := getattr(screen, "node_changed", None)) is not None:
                self.call_later(take, *((changed,) if isinstance(screen, NodeScreen) else ()))

    def _survey(self, node: Node) -> None:
        # The function: a coroutine that a newer one replaces before it begins would warn of that.
        ask: Callable[[], Awaitable[None]] = node.survey
        self.run_worker(ask, exclusive=True, group=f"survey {id(node)}", exit_on_error=False)

    def _tick(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, NodeScreen) and screen.framed:
                screen.tick()

    # Shared by the screens

    def tell(self, title: str, text: str, severity: Severity = "information") -> None:
        """Show a toast. The text may be untrusted."""
        if severity == "information" and self._crowded:
            return
        now = monotonic()
        self._toasts = [moment for moment in self._toasts if now - moment < 1.0]
        if len(self._toasts) >= _TOASTS_A_SECOND:
            if not self._untold:
                self.set_timer(1.0, self._tell_rest)
            self._untold += 1
            return
        self._toasts.append(now)
        self.notify(
            plain(text),
            title=plain(title),
            severity=severity,
            timeout=_TOAST_SECONDS[severity],
            markup=False,
        )

    @property
    def _crowded(self) -> bool:
        """Whether a toast would cover the banner that says that there is no phosd."""
        return self.node.contact is Contact.GONE and self.size.height < _ROOM_FOR_BOTH

    def _tell_rest(self) -> None:
        count, self._untold = self._untold, 0
        self.tell(
            f"{count} more of these", "Jobs (2) and Log (6) tell what became of each", "warning"
        )

    def watch_job(self, path: str) -> None:
        """Report the end of this job in a toast."""
        self._watched.add(path)
        self._tell_ended()

    def forget_jobs(self) -> None:
        """Report the end of no job that was begun before."""
        self._watched.clear()

    def _tell_ended(self) -> None:
        jobs = self.node.of(Job)
        for path in sorted(self._watched & jobs.keys()):
            job = jobs[path]
            if job.over:
                self._watched.discard(path)
                self._tell_result(job)

    def _tell_lost(self) -> None:
        """Report watched jobs that a new phosd does not know: the old one ended during them."""
        for path in sorted(self._watched - self.node.of(Job).keys()):
            self._watched.discard(path)
            number = path.rpartition("_")[2]
            why = "phosd ended while it was at work; what became of it is in the history (4)"
            self.tell(f"Job {number} is interrupted", why, "warning")

    def _tell_result(self, job: Job) -> None:
        became = "has failed" if job.state == "failed" else f"is {job.state}"
        title = f"Job {job.number}: {job.operation} of {job.target} {became}"
        if job.state != "done":
            severity: Severity = "warning" if job.state == "cancelled" else "error"
            self.tell(title, cause(job), severity)
            return
        stood = job.stop_seconds and job.operation not in ("suspend", "swap")  # it is still stopped
        stop = f"; the program stood still for {seconds(job.stop_seconds)}" if stood else ""
        self.tell(title, f"{result_text(job)}{stop}")

    # Actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "go":  # in an input, a digit is text
            return not self.screen.is_modal and not isinstance(self.focused, Input)
        return super().check_action(action, parameters)

    def action_go(self, mode: str) -> None:
        self.switch_mode(mode)

    def action_leave(self) -> None:
        if len(self.screen_stack) > 1:
            self.pop_screen()
        else:
            self.exit()

    def action_undo(self) -> None:
        """Go back, and never leave phos-tui. A table that does not show all rows took the key."""
        if len(self.screen_stack) > 1:
            self.pop_screen()

    def action_theme(self) -> None:
        dark = self.current_theme.dark
        self.theme = "textual-light" if dark else "textual-dark"

    def action_help(self) -> None:
        if isinstance(self.screen, NodeScreen):
            self.screen.action_help()
