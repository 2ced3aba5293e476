"""Make text safe for the terminal, and format figures.

Command lines, image names and errors come from users' programs. They are never parsed as markup,
and characters that move the cursor or change the writing direction are shown as escapes.
"""

import re
import shlex
from collections.abc import Sequence
from datetime import datetime

from rich.cells import cell_len, set_cell_size

from phosd.client import text as everywhere
from phosd.client.records import Job
from phosd.client.text import human_bytes, rate, since

__all__ = [
    "Cell",
    "bar",
    "cause",
    "command_line",
    "fit",
    "human_bytes",
    "plain",
    "rate",
    "seconds",
    "since",
    "spark",
    "when",
]

Cell = str | tuple[str, str]
"""A text, or a text and its tone: ``dim``, ``good``, ``warn``, ``bad``, ``stop`` or ``accent``."""
_LONGEST = 4096
"""Most characters of a text to process: a long command line must not slow the screen down."""
_MOST_WORDS = 256
_HEIGHTS = "▁▂▃▄▅▆▇█"
_OF_OTHERS = r"\n| \| "
"""What separates the cause in a message from the lines that other programs have printed."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


def plain(text: str, *, lines: bool = False) -> str:
    """Return the text with terminal control characters escaped; ``lines`` keeps line ends and
    tabs.
    """
    return everywhere.plain(text if lines else text[:_LONGEST], lines=lines)


def command_line(words: Sequence[str]) -> str:
    """Format a command line on one line."""
    return plain(shlex.join(word[:_LONGEST] for word in words[:_MOST_WORDS]))


def cause(job: Job) -> str:
    """Return why a job failed, on one line: the first of its message, without what other programs
    have printed. The job's page has all of it.
    """
    first, *more = re.split(_OF_OTHERS, job.message, maxsplit=1)
    return plain(f"{' '.join(first.split()) or job.error}{' …' if more else ''}")


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Cut or pad the text to exactly ``width`` cells; a cut leaves an ellipsis."""
    length = cell_len(text)
    if length > width:
        return set_cell_size(text, width - 1) + "…" if width > 1 else set_cell_size(text, width)
    space = " " * (width - length)
    return space + text if right else text + space


def seconds(value: float) -> str:
    """Format a duration: ``0.52 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min``, ``3 d 4 h``."""
    if value < 10:
        return f"{value:.2f} s"
    whole = int(value)
    for size, unit, lower, small in ((86400, "d", "h", 3600), (3600, "h", "min", 60)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {lower}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def when(moment: float | None) -> str:
    """Format local date and time to the second; empty for None."""
    if moment is None:
        return ""
    return datetime.fromtimestamp(moment).strftime("%Y-%m-%d %H:%M:%S")


def spark(shares: Sequence[float | None], width: int) -> str:
    """Draw the last ``width`` shares (0..1), one per cell; an unknown share leaves a blank."""
    cells = [" " if x is None else _HEIGHTS[round(min(1.0, max(0.0, x)) * 7)] for x in shares]
    return "".join(cells[-width:] if width else []).rjust(width)


def bar(share: float, width: int) -> str:
    """Draw a bar of ``width`` cells, filled to ``share`` (0..1)."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    filled, rest = divmod(eighths, 8)
    text = "█" * filled + (_EIGHTHS[rest] if rest else "")
    return text + "·" * (width - len(text))
