"""Follow the log of the hook in a process."""

from rich.text import Text
from textual.containers import VerticalScroll

from phosd.client.errors import CommandError
from phosd.client.records import Process
from phosd.tui.actions import bindings
from phosd.tui.node import Contact, Node
from phosd.tui.screens.page import PageScreen
from phosd.tui.text import command_line, plain

_SECONDS = 1.0
"""Seconds between two reads."""


class RingScreen(PageScreen):
    """The log ring of one process's hook, read periodically."""

    SCOPE = "ring"
    TITLE_TEXT = "Log of a process"
    SHOWS = frozenset({Process, Contact})
    BINDINGS = bindings("ring")

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self._text = ""
        self._asking = False

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).anchor()
        self.set_interval(_SECONDS, self.follow)
        self.follow()

    def show(self, node: Node) -> None:
        ended = "" if self._process.path in node.of(Process) else " (it has ended)"
        command = command_line(self._process.command)
        self.set_title(f"{self._process.pid}{ended}: {command}")

    def follow(self) -> None:
        """Read the log, unless the last read is still unanswered."""
        if not self._asking and self.node.contact is Contact.HERE:
            self._asking = True
            self.run_worker(self._read(), exit_on_error=False)

    async def _read(self) -> None:
        trouble = ""
        try:
            self._text = str(await self.node.ask(self._process, "ReadLog"))
        except CommandError as error:
            trouble = f"\n{error.code}: {error}"
        finally:
            self._asking = False
        page = Text(plain(self._text, lines=True) or "nothing was noted yet")
        page.append(plain(trouble, lines=True), "bold red")
        self.set_page(page)
