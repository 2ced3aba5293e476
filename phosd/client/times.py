"""Parse and format times on the command line: UTC, relative times and durations."""

import re
import time
from datetime import UTC, datetime, tzinfo

import click

_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


def duration(text: str) -> float | None:
    """Return the seconds of ``90``, ``90s``, ``5m``, ``5min``, ``2h`` or ``1d``; None for other
    text.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(|s|m|min|h|d)", text)
    return float(found[1]) * _UNITS[found[2]] if found and found[1].isascii() else None


def moment(_: click.Context, __: click.Parameter, text: str | None) -> int | None:
    """Convert an option such as ``2h`` (ago) or ``2026-11-21[T15:30[:00]]`` to microseconds since
    the epoch.

    Raises :class:`click.BadParameter`.
    """
    if text is None:
        return None
    try:
        return instant(text, time.time(), UTC)
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r} is no time; write for example 30m, 2h, 7d (ago), 2026-11-21 or "
            "2026-11-21T15:30 (UTC)"
        ) from None


def instant(text: str, now: float, zone: tzinfo | None = None) -> int:
    """Convert the same text, given the present time; a date without a zone is in ``zone`` (None:
    local time).

    Raises :class:`ValueError` or :class:`OverflowError`.
    """
    if not text[-1:].isdecimal() and (ago := duration(text)) is not None:
        seconds = now - ago
    else:
        found = datetime.fromisoformat(text)
        seconds = (found if found.tzinfo else found.replace(tzinfo=zone)).timestamp()
    return max(0, int(seconds * 1e6))


def time_text(microseconds: int) -> str:
    """Format microseconds since the epoch as UTC, to the second."""
    return datetime.fromtimestamp(microseconds / 1e6, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
