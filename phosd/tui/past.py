"""Parse times that users type, and bound what is asked of phosd's history and event log."""

from phosd.client.times import instant

SEVERITIES = ("info", "warning", "error")
"""Severities in rising order."""
MOST_ROWS = 10_000
"""Most rows that phosd returns in one call."""


def moment(text: str, now: float) -> int | None:
    """Parse ``2h`` (ago), ``2026-11-21`` or ``2026-11-21T15:30`` in local time to microseconds
    since the epoch; None for an empty text. Raises :class:`ValueError` with a message for the user.
    """
    text = text.strip()
    if not text:
        return None
    try:
        return instant(text, now)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is no time; write for example 30m, 2h, 7d (ago), 2026-11-21 or "
            "2026-11-21T15:30"
        ) from None
