"""Parse and format times on the command line: dates and relative times.

People write and read local time, programs UTC.
"""

import time
from datetime import UTC, datetime, timedelta, tzinfo

import click

from phosd.units import duration

_DAYS = {"today": 0, "yesterday": 1}


def moment(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Convert an option such as ``2h`` (ago), ``yesterday`` (its midnight) or
    ``2026-11-21[T15:30[:00]]`` to microseconds since the epoch.

    Raises :class:`click.BadParameter`.
    """
    if text is None:
        return None
    try:
        return instant(text, time.time())
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r} is no time; write for example 30m, 2h, 7d, 2w (ago), yesterday, "
            "2026-11-21, 2026-11-21T15:30 or 2026-11-21T15:30Z (UTC)"
        ) from None


def instant(text: str, now: float, zone: tzinfo | None = None) -> int:
    """Convert the same text, given the present time; a date without a zone is in ``zone`` (None:
    local time).

    Raises :class:`ValueError` or :class:`OverflowError`.
    """
    if not text[-1:].isdecimal() and (ago := duration(text)) is not None:
        seconds = now - ago
    elif text in _DAYS:
        day = datetime.fromtimestamp(now, zone) - timedelta(days=_DAYS[text])
        seconds = day.replace(hour=0, minute=0, second=0, microsecond=0).timestamp()
    else:
        found = datetime.fromisoformat(text)
        seconds = (found if found.tzinfo else found.replace(tzinfo=zone)).timestamp()
    return max(0, int(seconds * 1e6))


def time_text(microseconds: int) -> str:
    """Format microseconds since the epoch as UTC, to the second, for programs."""
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def local_time(text: str | None) -> str:
    """Format the text of :func:`time_text` as local time, for people; an empty string for None."""
    if text is None:
        return ""
    return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
