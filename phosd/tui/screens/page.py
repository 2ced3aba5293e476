"""A screen that is one page: a title, and below it text that scrolls."""

from rich.console import RenderableType
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from phosd.tui.screens.base import NodeScreen


class PageScreen(NodeScreen):
    """Those who have it set the title and the page whenever they know them."""

    DEFAULT_CSS = """
    PageScreen .title { padding: 0 1; text-style: bold; background: $boost; height: 1; }
    PageScreen VerticalScroll { padding: 0 1; }
    """

    def body(self) -> ComposeResult:
        yield Static(classes="title", markup=False)
        with VerticalScroll():
            yield Static(classes="page", markup=False)

    def set_title(self, title: str) -> None:
        """Text without markup, on one line."""
        self.query_one(".title", Static).update(title)

    def set_page(self, page: RenderableType) -> None:
        """What is below it."""
        self.query_one(".page", Static).update(page)
