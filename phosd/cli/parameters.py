"""Define kinds of parameters that need nothing of phosd."""

from typing import TYPE_CHECKING, Any

import click

from phosd.units import duration, duration_text

# Generic only in newer versions of click.
if TYPE_CHECKING:
    ParamType = click.ParamType[Any, Any]
else:
    ParamType = click.ParamType


class Duration(ParamType):
    """Seconds, or text with units such as ``5min``, from ``least`` to ``most``."""

    name = "duration"

    def __init__(self, least: float = 0.001, most: float = 86_400 * 365) -> None:
        self._least, self._most = least, most

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "90s|5min"

    def convert(
        self, value: str | float, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found = duration(value) if isinstance(value, str) else value
        if found is None:
            self.fail(f"{value!r} is no duration; write for example 90, 90s, 5min or 1h30min")
        if not self._least <= found <= self._most:
            limits = f"{duration_text(self._least)} and {duration_text(self._most)}"
            self.fail(f"{value} is not between {limits}")
        return found
