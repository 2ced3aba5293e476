"""What phosd's history and its log tell, as records; and when something was, as users write it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phosd.bus import ROOT
from phosd.client.times import instant
from phosd.tui.records import Job, Phase, Values

SEVERITIES = ("info", "warning", "error")
"""In rising order."""
MOST_ROWS = 10_000
"""Rows that phosd tells in one answer."""


@dataclass(frozen=True)
class Event:
    """Something that phosd noted, at ``time`` (seconds since the epoch)."""

    number: int
    time: float
    severity: str
    kind: str
    subject: str
    text: str


def event(row: Mapping[str, Any]) -> Event:
    """A row of ``ListEvents``."""
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
    """A row of ``ListHistory``: a job as it ended, or as it is."""
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
    """Microseconds since the epoch of ``2h`` (ago), ``2026-11-21`` or ``2026-11-21T15:30``, which
    are local time; None for an empty text. Raises :class:`ValueError`, which says how to write it.
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
