"""Provide a screen with a title and a scrolling text."""

from rich.console import RenderableType
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from phosd.tui.screens.base import NodeScreen


class PageScreen(NodeScreen):
    """A page; subclasses call :meth:`set_title` and :meth:`set_page`."""

    DEFAULT_CSS = """
    PageScreen .title { padding: 0 1; text-style: bold; background: $boost; height: 1; }
    PageScreen VerticalScroll { padding: 0 1; }
    """

    def body(self) -> ComposeResult:
        yield Static(classes="title", markup=False)
        with VerticalScroll():
            yield Static(classes="page", markup=False)

    def set_title(self, title: str) -> None:
        """Set the title: one line, no markup."""
        self.query_one(".title", Static).update(title)

    def set_page(self, page: RenderableType) -> None:
        """Set the content below the title."""
        self.query_one(".page", Static).update(page)
