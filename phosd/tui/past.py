"""Convert rows of phosd's history and event log to records, and parse times that users type."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phosd.bus import ROOT
from phosd.client.times import instant
from phosd.tui.records import Job, Phase, Values

SEVERITIES = ("info", "warning", "error")
"""Severities in rising order."""
MOST_ROWS = 10_000
"""Most rows that phosd returns in one call."""


@dataclass(frozen=True)
class Event:
    """An event recorded by phosd at ``time`` (seconds since the epoch)."""

    number: int
    time: float
    severity: str
    kind: str
    subject: str
    text: str


def event(row: Mapping[str, Any]) -> Event:
    """Convert a row of ``ListEvents``."""
    values = Values(row, str)
    return Event(
        number=values.whole("id"),
        time=values.time("time") or 0.0,
        severity=values.text("severity"),
        kind=values.text("kind"),
        subject=values.text("subject"),
        text=values.text("text"),
    )


def _phase(name: Any, begin: Any, seconds: Any, size: Any, stopped: Any) -> Phase:
    return Phase(str(name), bool(stopped), float(seconds), int(size), 0)


def past_job(row: Mapping[str, Any]) -> Job:
    """Convert a row of ``ListHistory``, of an ended or running job."""
    values = Values(row, str)
    number = values.whole("id")
    return Job(
        f"{ROOT}/job/_{number}",
        number=number,
        operation=values.text("operation"),
        target=values.text("target"),
        owner=values.whole("owner"),
        owner_name=values.user("owner"),
        state=values.text("state"),
        started=values.number("started") or None,
        ended=values.number("ended") or None,
        stop_seconds=values.number("stop_seconds"),
        mode=values.text("mode"),
        destination=values.text("destination"),
        why=values.text("why"),
        wrong_guesses=values.whole("wrong_guesses"),
        drained_bytes=values.whole("drained_bytes"),
        drain_rate=values.number("drain_rate"),
        scheduled=bool(values.whole("scheduled")),
        notes=tuple(filter(None, values.text("notes").split("\n"))),
        phases=values.rows("phases", _phase),
        result=values.text("result"),
        error=values.text("error"),
        message=values.text("message"),
    )


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
