"""Declare what screens and widgets need of the application."""

from typing import ClassVar, Literal

from textual.app import App

from phosd.tui.node import Node

Severity = Literal["information", "warning", "error"]


class Host(App[None]):
    """The application as its screens see it; :class:`~phosd.tui.app.PhosApp` implements it."""

    titles: ClassVar[dict[str, str]]
    """Titles of the screens by name, in the order of their number keys."""
    node: Node
    readonly: bool
    host: str
    """The name of the machine; empty: not shown."""

    def tell(self, title: str, text: str, severity: Severity = "information") -> None:
        """Show a toast. The text may be untrusted."""
        raise NotImplementedError

    def watch_job(self, path: str) -> None:
        """Report the end of this job in a toast."""
        raise NotImplementedError
