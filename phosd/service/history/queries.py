"""Query jobs, phases and events for D-Bus clients."""

import json
from typing import Annotated, Any

import msgspec

from phosd.interface.options import JobState, Operation
from phosd.interface.options import Severity as Words
from phosd.service.dbus.spec import Options
from phosd.service.history.database import Row
from phosd.service.history.events import Severity
from phosd.service.history.history import History
from phosd.service.jobs.options import END_OF_TIME, Time

_JOBS = """
select * from jobs where (:owner is null or owner = :owner)
and (:pid is null or operation = 'restore' and result = :pid
     or operation not in ('restore', 'verify', 'delete', 'export', 'import') and
        ' ' || target || ' ' like '% ' || :pid || ' %')
and (:operation is null or operation = :operation)
and (:state is null or state = :state)
and cast(started * 1e6 as integer) between :since and :until
and id < :before
order by id desc limit :limit
"""
_PHASES = """
select * from job_phases where job in (select value from json_each(?)) order by job, position
"""
_EVENTS = """
select id, cast(time * 1e6 as integer) as time, coalesce(severity, 'info') as severity, kind,
       subject, text, owner from events
where (:owner is null or owner = :owner)
and coalesce(severity, 'info') in (select value from json_each(:severities))
and cast(time * 1e6 as integer) >= :since
order by id desc limit :limit
"""
Phase = list[Any]
"""Name, begin (microseconds since the epoch), seconds, bytes, and whether the program was
stopped.
"""


class HistoryOptions(Options, frozen=True):
    """Options of ``ListHistory``: how many jobs, and of which: those that worked on process
    ``pid`` or restored it, those that began from ``since`` to ``until``, and those with a lower
    number than ``before``: with the last number of an answer, what follows it.
    """

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 50
    pid: Annotated[int, msgspec.Meta(ge=1)] | None = None
    operation: Operation | None = None
    state: JobState | None = None
    since: Time = 0
    until: Time = END_OF_TIME
    before: Annotated[int, msgspec.Meta(ge=1, le=END_OF_TIME)] = END_OF_TIME


class EventOptions(Options, frozen=True):
    """Options of ``ListEvents``: how many, of at least this severity, that happened at ``since`` or
    later.
    """

    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 200
    severity: Words = "info"
    since: Time = 0


ANY_JOB = HistoryOptions()
ANY_EVENT = EventOptions()


def jobs(history: History, wanted: HistoryOptions = ANY_JOB, owner: int | None = None) -> list[Row]:
    """Return the latest jobs, newest first, of one owner or of all. Flushes first, so that the
    states are current unless the history cannot be written.
    """
    history.flush()
    return history.query(
        _JOBS,
        {
            "owner": owner,
            "pid": None if wanted.pid is None else str(wanted.pid),
            "operation": wanted.operation,
            "state": wanted.state,
            "since": wanted.since,
            "until": wanted.until,
            "before": wanted.before,
            "limit": wanted.limit,
        },
    )


def phases(history: History, found: list[Row]) -> dict[int, list[Phase]]:
    """Return the phases of these jobs by job number."""
    by_job: dict[int, list[Phase]] = {}
    for row in history.query(_PHASES, [json.dumps([job["id"] for job in found])]):
        seconds = 0.0 if row["end"] is None else row["end"] - row["start"]
        by_job.setdefault(row["job"], []).append(
            [row["name"], int(row["start"] * 1e6), seconds, row["bytes"], bool(row["stopped"])]
        )
    return by_job


def events(
    history: History, wanted: EventOptions = ANY_EVENT, owner: int | None = None
) -> list[Row]:
    """Return the latest events, newest first, of one user or of all. Flushes first, so that the
    newest are included unless the history cannot be written.
    """
    history.flush()
    return history.query(
        _EVENTS,
        {
            "owner": owner,
            "severities": json.dumps(Severity(wanted.severity).and_worse),
            "since": wanted.since,
            "limit": wanted.limit,
        },
    )
