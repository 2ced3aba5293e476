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

    If it is too wide, the columns in ``spare`` are left out, from the first. The last column is
    folded, or with ``cut`` cut to a line; the others are folded only if the rest still does not
    fit.
    """
    shown = dict(columns)
    for heading in spare:
        if _least_width(shown) <= width:
            break
        del shown[heading]
    fits = _least_width(shown) <= width
    if cut and fits:
        last = next(reversed(shown))
        shown[last] = [_cut(text, width - _least_width(shown) + _LEAST) for text in shown[last]]
    made = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(shown, 1):
        made.add_column(heading, no_wrap=fits and number < len(shown), overflow="fold")
    for row in zip(*shown.values(), strict=True):
        made.add_row(*map(Text, row))
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
