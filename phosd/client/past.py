"""Convert rows of phosd's history and event log to records."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phosd.client.daemon import job_path
from phosd.client.records import Job, Phase, Values


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
        job_path(number),
        number=number,
        operation=values.text("operation"),
        target=values.text("target"),
        name=values.text("name"),
        within=values.text("within"),
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
        error_reason=values.text("reason"),
    )
