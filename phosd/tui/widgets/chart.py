"""Draw charts of figures over time with block characters, which every terminal has.

(Consoles lack fonts for braille charts; a column also shows a single figure.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rich.text import Text
from textual.widget import Widget

from phosd.tui.text import fit

Points = Sequence[tuple[float, float | None]]
"""Time (seconds since the epoch) and value, 0 or more; None: unknown."""
_FILLS = " ▁▂▃▄▅▆▇█"
_LABEL = 12
"""Most cells of a label."""
_LEAST_WITH_MIDDLE = 5
"""Rows from which there is a label in the middle, too."""
_DAY = 86_400.0


@dataclass(frozen=True)
class Plot:
    """Content of a chart: ``points`` within the times of ``span``, values from 0 to ``most`` (0: to
    the greatest value). ``write`` formats a value. A column without a point repeats the one before
    if that is at most ``hold`` seconds older.
    """

    title: str
    points: Points
    span: tuple[float, float]
    write: Callable[[float], str]
    most: float = 0.0
    hold: float = 0.0
    nothing: str = "nothing yet"
    """Text shown when there is no point at all."""


class Chart(Widget):
    """A :class:`Plot`, drawn to the size of the widget."""

    DEFAULT_CSS = """
    Chart { width: 1fr; height: 1fr; padding: 0 1; color: $foreground; }
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._plot: Plot | None = None

    def show(self, plot: Plot) -> None:
        """Replace the plot."""
        if plot != self._plot:
            self._plot = plot
            self.refresh()

    def render(self) -> Text:
        if self._plot is None:
            return Text()
        return draw(self._plot, self.size.width, self.size.height)


def draw(plot: Plot, width: int, height: int) -> Text:
    """Draw the chart in ``width`` times ``height`` cells."""
    text = Text.assemble((fit(plot.title, width), "bold"), no_wrap=True, overflow="crop")
    known = [value for _, value in plot.points if value is not None]
    most = max(plot.most, *known, 0.0) or 1.0
    top, ground = plot.write(most), plot.write(0.0)
    left = min(max(len(plot.write(most * share)) for share in (0.0, 0.5, 1.0)), _LABEL)
    cells, rows = width - left - 1, height - 2
    if not known or cells < 1 or rows < 1:
        text.append(f"\n{fit(plot.nothing if not known else '', width)}", "dim")
        return text
    values = spread(plot.points, plot.span, cells, plot.hold)
    labels = {0: top, rows - 1: ground}
    if rows >= _LEAST_WITH_MIDDLE:
        middle = rows // 2
        labels[middle] = plot.write(most * (rows - middle) / rows)
    for row, line in enumerate(columns(values, most, rows)):
        label = labels.get(row, "")
        text.append(f"\n{fit(label, left, right=True)}{'┤' if label else '│'}", "dim")
        text.append(line, "cyan")
    first, last = (_moment(moment, plot.span) for moment in plot.span)
    axis = first + last.rjust(cells - len(first)) if len(first) + len(last) < cells else last
    text.append(f"\n{' ' * left}└{fit(axis, cells, right=True)}", "dim")
    return text


def spread(
    points: Points, span: tuple[float, float], cells: int, hold: float = 0.0
) -> list[float | None]:
    """Return the greatest value of each column of time; None for a column without points."""
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
    """Return rows of block characters, top row first; a value of ``most`` takes all ``rows``.

    Every known value, even 0, leaves a mark on the bottom row.
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
