"""Draw tables for a terminal of any width, never cutting values that users copy."""

from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_LEAST = 20
"""Least width of the last column in cells: the length of an image id."""
_GAP = 2


def table(
    columns: Mapping[str, Sequence[str]], spare: Sequence[str], width: int, *, cut: bool = False
) -> Table:
    """Return a table of ``columns`` (by heading, the texts of all rows) for ``width`` cells.

    If it is too wide, its columns that are in ``spare`` are left out, from the first. The last
    column is folded, or with ``cut`` cut to a line. If the rest still does not fit, each row is
    shown as lines of their own, one for each column.
    """
    shown = dict(columns)
    for heading in spare:
        if _least_width(shown) <= width:
            break
        shown.pop(heading, None)
    least = _least_width(shown)
    if least > width:
        return _upright(shown)
    if cut:
        last = next(reversed(shown))
        shown[last] = [_cut(text, width - least + _LEAST) for text in shown[last]]
    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(shown, 1):
        made.add_column(heading, no_wrap=number < len(shown), overflow="fold")
    for row in zip(*shown.values(), strict=True):
        made.add_row(*map(Text, row))
    return made


def _upright(columns: Mapping[str, Sequence[str]]) -> Table:
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for number, row in enumerate(zip(*columns.values(), strict=True)):
        if number:
            made.add_row()
        for heading, text in zip(columns, row, strict=True):
            if text:
                made.add_row(heading, Text(text))
    return made


def _cut(text: str, width: int) -> str:
    """Return the text with each line cut to this many cells."""
    lines = [Text(line) for line in text.split("\n")]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return "\n".join(line.plain for line in lines)


def _least_width(columns: Mapping[str, Sequence[str]]) -> int:
    *narrow, last = (
        max(cell_len(line) for text in (heading, *texts) for line in text.split("\n"))
        for heading, texts in columns.items()
    )
    return sum(narrow) + _GAP * len(narrow) + min(last, _LEAST)
