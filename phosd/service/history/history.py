"""Record this node's jobs, events, images, and schedules of periodic checkpoints.

A file that is lost while phosd runs costs only knowledge of the past: schedules and their images
are also in memory and are written again (:mod:`phosd.service.api.maintenance`).
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from phosd.engine.image.manifest import Manifest
from phosd.engine.job.checkpoint_history import CheckpointHistory
from phosd.engine.job.journal import JobRecord
from phosd.errors import Internal, OutOfMemory
from phosd.service.history.database import Database, Row, storable
from phosd.service.history.events import Event, Severity
from phosd.service.history.pools import PoolRecords
from phosd.service.history.sleepers import SleeperRecords
from phosd.service.history.suspects import Suspects
from phosd.service.jobs.schedule import Schedule
from phosd.service.jobs.table import Job
from phosd.units import counted

_REMEMBERED = 8
"""Checkpoints of a process that the choice of its next mode is based on. A mode that failed is
tried again once the failure is no longer among them.
"""
_MOST_EVENTS = 100_000
"""Most events to keep, however recent."""


def _image_row(manifest: Manifest) -> Row:
    return {
        "id": manifest.id,
        "created": manifest.created,
        "owner": manifest.owner,
        "mode": manifest.mode,
        "device_bytes": manifest.device_bytes,
    }


def _past_checkpoint(row: Row) -> CheckpointHistory.Entry:
    details = json.loads(row["details"])
    return CheckpointHistory.Entry(
        mode=row["mode"],
        guessed_wrong=row["wrong_guesses"] > 0,
        # Only a drain that had begun has a duration.
        starved=row["error"] == OutOfMemory.__name__ and "drain_seconds" in details,
        lost=row["stop_seconds"] + (details.get("waited_seconds") or 0.0),
    )


class History:
    """The history. Another thread writes records in order; reads see what has been written so far.

    ``observer`` is called in that thread when :attr:`trouble` or :attr:`renewals` has changed;
    ``listener`` is called in any thread for each event.
    """

    observer: Callable[[], None] | None = None
    listener: Callable[[Event], None] | None = None

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # the database reports the error
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._database = Database(path, self._observe)
        self.suspects = Suspects(self._database)
        self.pools = PoolRecords(self._database)
        self.sleepers = SleeperRecords(self._database)
        rows = self._database.recall(
            "select id, made_for from images where made_for is not null and deleted is null"
        )
        self._made_for: dict[str, str] = {row["id"]: row["made_for"] for row in rows}
        """Keys of schedules by image; manifests do not have them."""
        rows = self._database.recall(
            "select process, made_of from jobs where made_of is not null and made_of != ''"
        )
        self.restored: dict[str, str] = {row["process"]: row["made_of"] for row in rows}
        """Images by the keys of the processes that were restored from them."""

    @property
    def trouble(self) -> str:
        """Why the history cannot be written at the moment; empty while it can."""
        return self._database.trouble

    @property
    def renewals(self) -> int:
        """How many unusable files were renamed since phosd started."""
        return self._database.renewals

    def _observe(self) -> None:
        if self.observer is not None:
            self.observer()

    def job(self, job: Job) -> None:
        """Record a job in its present state, with its phases once it has ended."""
        task, error = job.task, job.error
        if job.outcome.made_of:
            self.restored[job.outcome.process] = job.outcome.made_of
        row = {
            "id": job.number,
            "operation": task.operation,
            "target": task.target,
            "owner": task.owner,
            "state": str(job.state),
            "started": job.started,
            "ended": job.ended,
            "mode": job.outcome.mode or task.mode,
            "destination": task.destination,
            "name": job.called.name,
            "within": job.called.within,
            "result": job.outcome.result,
            "error": error.code if error else "",
            "reason": error.reason if error else "",
            "message": str(error) if error else "",
            "stop_seconds": job.progress.stop_seconds,
            "notes": "\n".join(job.progress.notes),
            "why": job.outcome.why,
            "wrong_guesses": job.progress.wrong_guesses,
            "drained_bytes": job.drained.bytes,
            "drain_rate": job.drained.rate,
            "scheduled": int(task.scheduled),
            "executable": task.executable,
            "process": job.outcome.process or task.process,
            "made_of": job.outcome.made_of,
            "token": task.token,
            "details": json.dumps(job.progress.figures.measured()),
        }
        # Phases have monotonic times; the history stores seconds since the epoch.
        offset = job.started - (job.progress.phases[0].start if job.progress.phases else 0.0)
        phases = [
            {
                "job": job.number,
                "position": position,
                "name": phase.name,
                "stopped": int(phase.stopped),
                "start": phase.start + offset,
                "end": None if phase.end is None else phase.end + offset,
                "bytes": phase.bytes_done,
            }
            for position, phase in enumerate(job.progress.phases if job.ended else ())
        ]

        def run(db: Any) -> None:
            with db.atomic():
                db["jobs"].upsert(storable(row), pk="id")
                db["job_phases"].insert_all(phases, replace=True)

        self._database.record(run)

    def interrupted(self, record: JobRecord, settled: str, result: str = "") -> None:
        """Record a job that an earlier phosd left unfinished, and how it was settled."""
        row = {
            "id": record.job,
            "operation": record.operation,
            "target": record.target,
            "owner": record.owner,
            "state": "interrupted",
            "started": record.started,
            "ended": time.time(),
            "error": "Internal",
            "message": f"phosd ended while the job ran; {settled}",
            "result": result,
            "token": record.token,
        }
        self._database.record(lambda db: db["jobs"].upsert(storable(row), pk="id"))
        text = f"{record.operation} {record.target}: {settled}"
        subject = f"job {record.job}"
        self.event(Event("interrupted", subject, text, Severity.WARNING, record.owner))

    def image(
        self,
        manifest: Manifest,
        whole: bool | None = None,
        made_for: Schedule | None = None,
        rehearsal: str | None = None,
    ) -> None:
        """Record an image. ``whole`` is the result of a verification just made, ``rehearsal`` why a
        restore just rehearsed would fail (empty: it would not), ``made_for`` the schedule that the
        image belongs to.
        """
        row = _image_row(manifest)
        if whole is not None:
            row |= {"verified": time.time(), "verified_ok": int(whole)}
        if rehearsal is not None:
            row |= {"rehearsed": time.time(), "rehearsal": rehearsal}
        if made_for is not None:
            row["made_for"] = self._made_for[manifest.id] = made_for.key
        self._database.record(lambda db: db["images"].upsert(storable(row), pk="id"))

    def reconcile(self, images: Iterable[Manifest]) -> None:
        """Make the recorded images match the manifests, which are authoritative. Other facts about
        each image are kept, and a new file gets the schedules of the images again.
        """
        rows = {image.id: storable(_image_row(image)) for image in images}
        made_for = {image: key for image, key in list(self._made_for.items()) if image in rows}
        now = time.time()

        def run(db: Any) -> None:
            with db.atomic():
                db["images"].upsert_all(rows.values(), pk="id")
                for image, key in made_for.items():
                    db["images"].update(image, {"made_for": key})
                for row in list(db.query("select id from images where deleted is null")):
                    if row["id"] not in rows:
                        db["images"].update(row["id"], {"deleted": now})

        self._database.record(run)

    def image_deleted(self, image: str, why: str, owner: int | None = None) -> None:
        """Record the deletion of an image and its reason. ``owner`` is a user id, None if
        unknown.
        """
        self.event(Event("image-deleted", image, why, owner=owner))
        self._made_for.pop(image, None)
        row = {"id": image, "deleted": time.time()}
        self._database.record(lambda db: db["images"].upsert(storable(row), pk="id"))

    def images_made_for(self, schedule: Schedule) -> dict[str, bool | None]:
        """Return the images of a schedule, newest first, and whether each verified as intact (None:
        never verified).
        """
        rows = self._database.recall(
            "select id, verified_ok from images where made_for = ? and deleted is null "
            "order by id desc",
            [schedule.key],
        )
        found = {row["id"]: row["verified_ok"] for row in rows}
        return {image: None if ok is None else bool(ok) for image, ok in found.items()}

    def last_made_for(self, schedule: Schedule) -> float:
        """Return when the latest image of a schedule was made (seconds since the epoch), or 0."""
        rows = self._database.recall(
            "select created from images where made_for = ? order by id desc limit 1",
            [schedule.key],
        )
        return datetime.fromisoformat(rows[0]["created"]).timestamp() if rows else 0.0

    def schedule(self, schedule: Schedule) -> None:
        """Record a schedule that begins, changes or ends."""
        row = schedule.row()
        key = ("boot_id", "pid", "start_time")
        self._database.record(lambda db: db["schedules"].upsert(storable(row), pk=key))

    def forget_schedules(self, living: Iterable[Schedule]) -> None:
        """Delete all schedules but those of living processes, and those that have made images."""
        keys = {schedule.key for schedule in living} | {*self._made_for.values()}

        def run(db: Any) -> None:
            with db.atomic():
                for row in list(db["schedules"].rows):
                    if Schedule.key_of(row) not in keys:
                        db["schedules"].delete((row["boot_id"], row["pid"], row["start_time"]))

        self._database.record(run)

    def schedules(self) -> list[Row]:
        """Return every schedule, including those of processes that have ended."""
        return self._database.recall("select * from schedules")

    def schedule_of(self, image: str) -> Schedule | None:
        """Return the schedule that has made an image, if it has not been forgotten."""
        key = self._made_for.get(image)
        for row in self.schedules() if key is not None else ():
            if Schedule.key_of(row) == key:
                with contextlib.suppress(msgspec.DecodeError):  # of another version
                    return Schedule.of_row(row)
        return None

    def past_checkpoints(self, process: str) -> tuple[CheckpointHistory.Entry, ...]:
        """Return the last checkpoints of a process that succeeded or failed, latest first."""
        rows = self._database.recall(
            "select mode, error, wrong_guesses, stop_seconds, details from jobs where process = ? "
            "and operation = 'checkpoint' and state in ('done', 'failed') order by id desc limit ?",
            [process, _REMEMBERED],
        )
        return tuple(_past_checkpoint(row) for row in rows)

    def event(self, event: Event) -> None:
        """Record an event and pass it to the listener."""
        row = {
            "time": time.time(),
            "kind": event.kind,
            "subject": event.subject,
            "text": event.text,
            "severity": str(event.severity),
            "owner": event.owner,
        }
        self._database.record(lambda db: db["events"].insert(storable(row)))
        listener = self.listener
        if listener is not None:
            listener(event)

    def prune(self, before: float) -> None:
        """Delete jobs, events, deleted images and suspects older than ``before``, in seconds since
        the epoch.
        """

        def run(db: Any) -> None:
            with db.atomic():
                old = "select id from jobs where started < ? and ended is not null"
                db.execute(f"delete from job_phases where job in ({old})", [before])
                db.execute("delete from jobs where started < ? and ended is not null", [before])
                db.execute("delete from events where time < ?", [before])
                db.execute(
                    "delete from events where id <= (select max(id) from events) - ?",
                    [_MOST_EVENTS],
                )
                db.execute("delete from images where deleted < ?", [before])
                db.execute("delete from kernels where last_seen < ?", [before])

        self._database.record(run)

    def settle(self, when: float) -> None:
        """Mark unfinished jobs of an earlier phosd as interrupted at time ``when``.

        Those with something to settle are in the journal (:meth:`interrupted`).
        """
        message = "phosd ended before it recorded the job's end; nothing was left to settle"

        def run(db: Any) -> None:
            with db.atomic():
                db.execute(
                    "update jobs set state = 'interrupted', ended = ?, error = 'Internal', "
                    "message = ? where state in ('queued', 'running')",
                    [when, message],
                )

        self._database.record(run)

    def next_job(self) -> int:
        """Return an unused job number. When the history cannot be read, take it from the clock: no
        node runs a job every second for years, so the clock is ahead of all numbers.
        """
        try:
            last = self.query("select coalesce(max(id), 0) as last from jobs")[0]["last"]
        except Internal:
            return int(time.time())
        return 1 + int(last)

    def users(self) -> set[int]:
        """Return the ids of all users whose programs had a job."""
        return {row["owner"] for row in self._database.recall("select distinct owner from jobs")}

    def verified(self) -> dict[str, tuple[float, bool]]:
        """Return when each image was last verified, and whether it was intact."""
        rows = self._database.recall(
            "select id, verified, verified_ok from images where verified not null"
        )
        return {row["id"]: (row["verified"], bool(row["verified_ok"])) for row in rows}

    def rehearsed(self) -> dict[str, tuple[float, str]]:
        """Return when each image's restore was rehearsed last, and why it would have failed."""
        rows = self._database.recall(
            "select id, rehearsed, rehearsal from images where rehearsed not null"
        )
        return {row["id"]: (row["rehearsed"], str(row["rehearsal"])) for row in rows}

    def crashed(self, image: str, owner: int, count: int, *, told: bool = True) -> None:
        """Record how often in a row the program has crashed soon after its restore from an image of
        user id ``owner``; 0: it goes on. It is an event, too, if it is to be ``told``.
        """
        row = {"id": image, "crashes": count}
        self._database.record(lambda db: db["images"].upsert(row, pk="id"))
        if count and told:
            text = (
                f"the program has crashed soon after its restore, {counted(count, 'time')} in a row"
            )
            self.event(Event("crash", image, text, Severity.WARNING, owner))

    def crashes(self) -> dict[str, int]:
        """Return how often in a row programs have crashed so, by image, if they have."""
        rows = self._database.recall("select id, crashes from images where crashes > 0")
        return {row["id"]: row["crashes"] for row in rows}

    def query(self, sql: str, params: Any = ()) -> list[Row]:
        """Return the rows of a reading statement. Raises :class:`Internal` if that fails."""
        return self._database.query(sql, params)

    def recall(self, sql: str, params: Any = ()) -> list[Row]:
        """Return the rows of a reading statement, or no rows when the file cannot be read."""
        return self._database.recall(sql, params)

    def then(self, work: Callable[[], None]) -> None:
        """Call ``work`` in another thread when all that was recorded before is in the file."""
        self._database.record(lambda _: work())

    def flush(self) -> None:
        """Wait until all earlier records are in the file, or have failed for now."""
        self._database.flush()

    def close(self) -> None:
        """Write the remaining records and close the file."""
        self._database.close()
