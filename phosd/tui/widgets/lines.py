"""Provide lines of text that are laid out anew only when their number changes."""

from collections.abc import Sequence
from typing import Any

from rich.text import Text
from textual.widgets import Static


class Lines(Static):
    """Lines that change often; without lines it is not displayed."""

    DEFAULT_CSS = "Lines { height: auto; padding: 0 1; text-wrap: nowrap; }"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(markup=False, **kwargs)
        self._lines: Sequence[Text] | None = None

    def say(self, lines: Sequence[Text]) -> None:
        """Replace the lines."""
        before = self._lines
        if lines == before:
            return
        self._lines = lines
        self.display = bool(lines)
        moved = before is None or len(lines) != len(before)
        self.update(Text("\n").join(lines), layout=moved)
