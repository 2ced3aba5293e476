"""Provide dialogs: a question, a form, and the help."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import ClassVar, TypeVar

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text
from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Select, Static

from phosd.tui.text import plain

_T = TypeVar("_T")
_NARROW = 64
"""Cells of a question that is no table."""
_FRAME = 6
"""Cells of a dialog's border and padding, on both sides."""


class Dialog(ModalScreen[_T]):
    """A dialog that ignores keys pressed before it was visible.

    ``gone`` returns why the dialog has become void, empty as long as it has not: its subject may
    vanish while it is open. The button ``_YES`` is then disabled.
    """

    DEFAULT_CSS = """
    Dialog .gone { display: none; color: $text-error; text-style: bold; margin-top: 1; }
    """
    _YES: ClassVar[str]

    def __init__(self, gone: Callable[[], str]) -> None:
        super().__init__()
        self._gone = gone
        self._in_sight = 0.0

    def on_screen_resume(self) -> None:
        self._in_sight = self._in_sight or monotonic()

    def takes(self, key: events.Key) -> bool:
        """Whether the dialog was visible when the key was pressed."""
        return 0 < self._in_sight <= key.time

    def node_changed(self) -> None:
        """Check whether the subject still exists.

        A change may come before the dialog is composed: there is nothing to draw yet, and it checks
        once it is mounted.
        """
        why = self._gone()
        for place in self.query(".gone").results(Static):
            place.update(plain(why))
            place.display = bool(why)
        for yes in self.query(self._YES).results(Button):
            yes.disabled = bool(why)


class Question(Dialog[bool]):
    """A confirmation of something that cannot be undone. No is the default."""

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Vertical {
        width: 64; max-width: 90%; height: auto; max-height: 90%; padding: 1 2;
        background: $surface; border: round $warning;
    }
    Question Horizontal { height: auto; margin-top: 1; align-horizontal: right; }
    Question Button { margin-left: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("n,escape", "no", "No"),
        ("y", "yes", "Yes"),
        ("left,right", "app.focus_next", "The other"),
    ]
    _YES = "#yes"

    def __init__(
        self, text: str, yes: str, gone: Callable[[], str] = lambda: "", *, rows: bool = False
    ) -> None:
        """``rows``: lines of the text are rows of a table, which are not broken where there is
        room.
        """
        super().__init__(gone)
        self._text = text
        self._rows = rows
        self._yes = yes

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(self._text, markup=False)
            yield Static("", classes="gone", markup=False)
            with Horizontal():
                yield Button("No", id="no")
                yield Button(self._yes, id="yes", variant="error")

    def on_mount(self) -> None:
        if self._rows:
            longest = max(map(cell_len, self._text.splitlines()))
            self.query_one(Vertical).styles.width = max(_NARROW, longest + _FRAME)
        self.query_one("#no", Button).focus()
        self.node_changed()

    @on(Button.Pressed, "#no")
    def action_no(self) -> None:
        self.dismiss(False)

    @on(Button.Pressed, "#yes")
    def action_yes(self) -> None:
        if not self._gone():
            self.dismiss(True)


@dataclass(frozen=True)
class Choice:
    """A form line with a choice: the option's name, its label, and pairs of shown text and value,
    of which the first is the default.
    """

    name: str
    label: str
    values: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Field:
    """A form line with text input. ``check`` returns what is wrong with a text; empty if nothing
    is.
    """

    name: str
    label: str
    value: str = ""
    hint: str = ""
    check: Callable[[str], str] = lambda text: ""


def _widget(choice: Choice | Field) -> Select[str] | Input:
    if isinstance(choice, Field):
        return Input(choice.value, choice.hint, id=choice.name, compact=True)
    values = [(plain(text), value) for text, value in choice.values]
    return Select(values, id=choice.name, allow_blank=False, compact=True)


class Form(Dialog[dict[str, str] | None]):
    """A form that asks for options. The result maps names to values, or is None if cancelled."""

    DEFAULT_CSS = """
    Form { align: center middle; }
    Form > VerticalScroll {
        width: 76; max-width: 95%; height: auto; max-height: 95%; padding: 0 2;
        background: $surface; border: round $primary;
    }
    Form .title { text-style: bold; margin-bottom: 1; }
    Form .choice { height: auto; margin-bottom: 1; }
    Form Label { width: 2fr; padding-right: 1; color: $text-muted; }
    Form Select, Form Input { width: 3fr; }
    Form .wrong { display: none; color: $text-error; text-style: bold; }
    Form .buttons { height: auto; align-horizontal: right; }
    Form Button { margin-left: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("escape", "cancel", "Cancel")]
    _YES = "#go"

    def __init__(
        self,
        title: str,
        choices: Sequence[Choice | Field],
        go: str,
        gone: Callable[[], str] = lambda: "",
    ) -> None:
        super().__init__(gone)
        self._title = title
        self._choices = choices
        self._go = go

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            yield Static(self._title, markup=False, classes="title")
            for choice in self._choices:
                with Horizontal(classes="choice"):
                    yield Label(choice.label, markup=False)
                    yield _widget(choice)
            yield Static("", classes="wrong", markup=False)
            yield Static("", classes="gone", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel")
                yield Button(self._go, id="go", variant="primary")

    def on_mount(self) -> None:
        asked_first = self._choices[0]
        place = f"#{asked_first.name}" if isinstance(asked_first, Field) else "#go"
        self.query_one(place).focus()
        self.node_changed()

    @on(Button.Pressed, "#cancel")
    def action_cancel(self) -> None:
        self.dismiss(None)

    @on(Button.Pressed, "#go")
    @on(Input.Submitted)
    def _finish(self) -> None:
        if self._gone():
            return
        given = {str(select.id): str(select.value) for select in self.query(Select)}
        given |= {str(field.id): field.value.strip() for field in self.query(Input)}
        checks = {each.name: each.check for each in self._choices if isinstance(each, Field)}
        wrong = [why for name, check in checks.items() if (why := check(given[name]))]
        if not wrong:
            self.dismiss(given)
            return
        place = self.query_one(".wrong", Static)
        place.update(plain("; ".join(wrong)))
        place.display = True
        place.scroll_visible()


class Help(ModalScreen[None]):
    """A list of keys: rows of key, name, description, and why it is unavailable."""

    DEFAULT_CSS = """
    Help { align: center middle; }
    Help > VerticalScroll {
        width: 84; max-width: 95%; height: auto; max-height: 95%; padding: 1 2;
        background: $surface; border: round $primary;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,question_mark", "dismiss", "Close")]

    def __init__(self, title: str, rows: Sequence[tuple[str, str, str, str]]) -> None:
        super().__init__()
        self._title = title
        self._rows = rows

    def compose(self) -> ComposeResult:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(justify="right", style="bold", no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column()
        for key, name, about, why_not in self._rows:
            dim = "dim" if why_not else ""
            entry = Text(about)
            if why_not:
                entry.append(f"\nnot now: {why_not}", "italic")
            table.add_row(Text(key), Text(name), entry, style=dim)
        with VerticalScroll():
            yield Static(Text(self._title + "\n", style="bold"))
            yield Static(table)
