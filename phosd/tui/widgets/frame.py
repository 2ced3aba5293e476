"""Draw the frame of every screen: top line, banner and line of keys."""

from collections.abc import Sequence

from rich.text import Text
from textual import events
from textual.message import Message
from textual.widgets import Static

from phosd.tui.actions import Action, keys_drawn
from phosd.tui.host import Host
from phosd.tui.node import Contact, Node
from phosd.tui.text import plain, since

_CUT = 4
"""Letters of a screen's title where there is no room for all."""
_IMPATIENT = 2.0
"""Seconds after which an unanswered call is reported."""


class TopLine(Static):
    """The line with the screens by number, and the contact to phosd."""

    DEFAULT_CSS = "TopLine { height: 1; background: $panel; color: $foreground; }"
    app: Host

    def __init__(self, current: str) -> None:
        super().__init__()
        self._current = current
        self._ends: list[tuple[int, str]] = []

    def show(self, node: Node) -> None:
        """Redraw the line, with the contact to the node's phosd."""
        marks = {Contact.HERE: "●", Contact.SEEKING: "◌", Contact.GONE: "✗"}
        mark = ("… " if node.waiting else "") + marks[node.contact]
        readonly = " readonly" if self.app.readonly else ""
        version = f" phosd {plain(node.manager.version)}".rstrip()
        host = f" {plain(node.name)}" if node.name else ""
        self.say(
            mark + host + version + readonly,
            mark + host + (readonly or " phosd"),
            mark + (readonly or host or " phosd"),
            mark,
        )

    def say(self, *texts: str) -> None:
        """Redraw the line, with the first of these texts for which there is room. The titles are
        cut where there is none for the second of them.
        """
        line = self._titles(None)
        if len(texts[:2][-1]) >= self._room(line):
            line = self._titles(_CUT)
        room = self._room(line)
        for right in texts:
            if len(right) < room:
                line.append(right.rjust(room))
                break
        self.update(line, layout=False)

    def _room(self, line: Text) -> int:
        return self.size.width - line.cell_len - 1

    def _titles(self, most: int | None) -> Text:
        """Return the numbers and titles of the screens, of ``most`` letters each."""
        line = Text(no_wrap=True, overflow="crop")
        self._ends = []
        for number, (name, title) in enumerate(self.app.titles.items(), self.app.first_number):
            here = name == self._current
            line.append(f"{number}", "bold" if here else "")
            line.append(f" {title[:most]} ", "bold reverse" if here else "")
            self._ends.append((line.cell_len, name))
        return line

    def on_click(self, event: events.Click) -> None:
        name = next((name for end, name in self._ends if event.x < end), None)
        if name is not None:
            self.app.switch_mode(name)


class KeyLine(Static):
    """The keys of the screen; clicking one presses it. Unavailable actions are dimmed and in
    brackets.
    """

    DEFAULT_CSS = "KeyLine { dock: bottom; height: 1; background: $panel; color: $foreground; }"

    def __init__(self) -> None:
        super().__init__()
        self._line = Text()
        self._ends: list[tuple[int, Action]] = []

    def show(self, actions: Sequence[tuple[Action, bool]]) -> None:
        """Draw these actions, each with whether it is available."""
        entries = [(action, _entry(action, possible)) for action, possible in actions]
        while len(entries) > 1 and sum(e.cell_len for _, e in entries) > self.size.width:
            entries.pop(-2)  # the last one is the help, which lists the others
        line = Text(no_wrap=True, overflow="crop")
        self._ends = []
        for action, entry in entries:
            line.append_text(entry)
            self._ends.append((line.cell_len, action))
        if line != self._line:
            self._line = line
            self.update(line, layout=False)

    def on_click(self, event: events.Click) -> None:
        action = next((action for end, action in self._ends if event.x < end), None)
        if action is not None:
            self.post_message(self.Pressed(action))

    class Pressed(Message):
        """An action was clicked."""

        def __init__(self, action: Action) -> None:
            super().__init__()
            self.action = action


def _entry(action: Action, possible: bool) -> Text:
    name = action.name if possible else f"({action.name})"
    entry = Text.assemble((f" {keys_drawn(action)}", "bold"), f" {name}")
    if not possible:
        entry.stylize("dim")
    return entry


class Banner(Static):
    """A banner that reports the loss of phosd, and its troubles."""

    DEFAULT_CSS = """
    Banner {
        display: none; height: auto; padding: 0 1; max-height: 6;
        background: $error-muted; color: $text-error; text-style: bold;
    }
    Banner.-there { display: block; }
    Banner.-mild { background: $warning-muted; color: $text-warning; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._words = ("", False)

    def show(self, node: Node) -> None:
        """Redraw the banner."""
        text, mild = _words(node)
        if (text, mild) == self._words:
            return
        self._words = text, mild
        self.set_class(bool(text), "-there")
        self.set_class(mild, "-mild")
        if text:
            self.update(Text(text))


def _words(node: Node) -> tuple[str, bool]:
    """Return the banner's text, and whether it is only a warning."""
    now = node.now()
    old = f" What is shown is {since(node.heard, now)} old." if node.heard else ""
    if node.contact is Contact.GONE:
        return f"✗ No phosd for {since(node.since, now)}: {plain(node.trouble)}.{old}", False
    if node.contact is Contact.SEEKING:
        if now - node.since < _IMPATIENT:
            return "", True
        return f"◌ Waiting for phosd, for {since(node.since, now)}.{old}", True
    waiting = node.waiting
    if waiting is not None and now - waiting.since >= _IMPATIENT:
        passed = since(waiting.since, now)
        return f"◌ Waiting for phosd: no answer to {waiting.member} for {passed}.", True
    if node.manager.troubles:
        first, *others = node.manager.troubles
        more = f" (and {len(others)} more)" if others else ""
        return f"! {plain(first)}{more}", True
    return "", True
