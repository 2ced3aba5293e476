"""What screens and widgets know of the application that shows them."""

from typing import ClassVar, Literal

from textual.app import App

from phosd.tui.node import Node

Severity = Literal["information", "warning", "error"]


class Host(App[None]):
    """The application, as its screens see it. :class:`~phosd.tui.app.PhosApp` is the one."""

    titles: ClassVar[dict[str, str]]
    """The title of each screen by its name, in the order of their number keys."""
    node: Node
    readonly: bool

    def tell(self, title: str, text: str, severity: Severity = "information") -> None:
        """A toast. The text may come from anywhere."""
        raise NotImplementedError

    def watch_job(self, path: str) -> None:
        """Tell when this job ends, and how."""
        raise NotImplementedError
