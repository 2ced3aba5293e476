"""Declare what screens and widgets need of the application."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from textual.app import App

from phosd.tui.node import Node

Severity = Literal["information", "warning", "error"]


class Host(App[None]):
    """The application as its screens see it; :class:`~phosd.tui.app.PhosApp` implements it."""

    titles: ClassVar[dict[str, str]]
    """Titles of the screens by name, in the order of their number keys."""
    first_number: ClassVar[int] = 1
    """The number key of the first one."""
    node: Node
    """The node whose screens are shown."""
    readonly: bool

    @property
    def nodes(self) -> Sequence[Node]:
        """All nodes that are mirrored."""
        return [self.node]

    async def open_node(self, node: Node) -> None:
        """Go to the first screen of one of them."""
        raise NotImplementedError

    def tell(self, title: str, text: str, severity: Severity = "information") -> None:
        """Show a toast. The text may be untrusted."""
        raise NotImplementedError

    def watch_job(self, path: str) -> None:
        """Report the end of this job in a toast."""
        raise NotImplementedError
