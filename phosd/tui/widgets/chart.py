"""A chart of figures over time: columns of blocks, which every terminal has.

(Charts of finer dots need fonts that consoles do not have; a column also shows one single figure.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.text import Text
from textual.widget import Widget

from phosd.tui.text import fit

Points = Sequence[tuple[float, float | None]]
"""Time (seconds since the epoch) and value, which is 0 or more; None: nobody knows."""
_FILLS = " ▁▂▃▄▅▆▇█"
_LABEL = 12
"""Cells that a label may take."""
_DAY = 86_400.0


@dataclass(frozen=True)
class Plot:
    """What a chart shows: ``points`` between the times of ``span``, values from 0 to ``most`` (0:
    to the greatest one). ``write`` makes a text of a value. A column without a point shows the one
    before, when it is no more than ``hold`` seconds older.
    """

    title: str
    points: Points
    span: tuple[float, float]
    write: Callable[[float], str]
    most: float = 0.0
    hold: float = 0.0
    nothing: str = "nothing yet"
    """Said where there is no point at all."""


class Chart(Widget):
    """A :class:`Plot` in whatever room there is."""

    DEFAULT_CSS = """
    Chart { width: 1fr; height: 1fr; padding: 0 1; color: $foreground; }
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._plot: Plot | None = None

    def show(self, plot: Plot) -> None:
        """Show this from now on."""
        if plot != self._plot:
            self._plot = plot
            self.refresh()

    def render(self) -> Text:
        if self._plot is None:
            return Text()
        return draw(self._plot, self.size.width, self.size.height)


def draw(plot: Plot, width: int, height: int) -> Text:
    """The chart in ``width`` times ``height`` cells."""
    text = Text.assemble((fit(plot.title, width), "bold"), no_wrap=True, overflow="crop")
    known = [value for _, value in plot.points if value is not None]
    most = max(plot.most, *known, 0.0) or 1.0
    top, ground = plot.write(most), plot.write(0.0)
    left = min(max(len(top), len(ground)), _LABEL)
    cells, rows = width - left - 1, height - 2
    if not known or cells < 1 or rows < 1:
        text.append(f"\n{fit(plot.nothing if not known else '', width)}", "dim")
        return text
    values = spread(plot.points, plot.span, cells, plot.hold)
    labels = {0: top, rows - 1: ground}
    for row, line in enumerate(columns(values, most, rows)):
        text.append(f"\n{fit(labels.get(row, ''), left, right=True)}", "dim")
        text.append("│", "dim")
        text.append(line, "cyan")
    first, last = (_moment(moment, plot.span) for moment in plot.span)
    axis = first + last.rjust(cells - len(first)) if len(first) + len(last) < cells else last
    text.append(f"\n{' ' * left}└{fit(axis, cells, right=True)}", "dim")
    return text


def spread(
    points: Points, span: tuple[float, float], cells: int, hold: float = 0.0
) -> list[float | None]:
    """The greatest value of each column of time; None where there is none."""
    first, last = span
    step = max(last - first, 1e-6) / cells
    values: list[float | None] = [None] * cells
    held = [(-1.0, 0.0)] * cells
    for moment, value in points:
        if not first <= moment <= last:
            continue
        column = min(cells - 1, int((moment - first) / step))
        before = values[column]
        if value is not None:
            values[column] = value if before is None else max(value, before)
            held[column] = (moment, value)
    for column in range(1, cells):
        moment, value = held[column - 1]
        if values[column] is None and moment >= 0 and first + column * step - moment <= hold:
            values[column], held[column] = value, held[column - 1]
    return values


def columns(values: Sequence[float | None], most: float, rows: int) -> list[str]:
    """Columns as high as the values, of which ``most`` takes all ``rows``; the top row first.

    What is known leaves a mark on the ground, also when it is 0.
    """
    heights = [None if v is None else max(1, round(v / most * rows * 8)) for v in values]
    return [
        "".join(
            " " if height is None else _FILLS[max(0, min(8, height - row * 8))]
            for height in heights
        )
        for row in reversed(range(rows))
    ]


def _moment(moment: float, span: tuple[float, float]) -> str:
    form = "%m-%d %H:%M" if span[1] - span[0] > _DAY else "%H:%M:%S"
    return datetime.fromtimestamp(moment).strftime(form)
