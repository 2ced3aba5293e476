"""What happened on this node, and what was decided: the schedules, and which images are theirs.

A file that is lost while phosd runs costs only knowledge of the past, since what was decided is in
memory, too, and is written again (:mod:`phosd.service.api.maintenance`).
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from phosd.engine.image.manifest import Manifest
from phosd.engine.job.experience import PastCheckpoint
from phosd.engine.job.journal import JobRecord
from phosd.errors import Internal, OutOfMemory
from phosd.service.history.database import Database, Row, storable
from phosd.service.history.events import Event, Severity
from phosd.service.history.suspects import Suspects
from phosd.service.jobs.schedule import Schedule
from phosd.service.jobs.table import Job

_REMEMBERED = 8
"""Checkpoints of a process that the next one's mode is chosen by: what went wrong once is tried
again when it is no longer among them.
"""
_MOST_EVENTS = 100_000
"""Events that are kept, however young they are."""


def _image_row(manifest: Manifest) -> Row:
    return {
        "id": manifest.id,
        "created": manifest.created,
        "owner": manifest.owner,
        "mode": manifest.mode,
        "device_bytes": manifest.device_bytes,
    }


def _past_checkpoint(row: Row) -> PastCheckpoint:
    details = json.loads(row["details"])
    return PastCheckpoint(
        mode=row["mode"],
        guessed_wrong=row["wrong_guesses"] > 0,
        # Only a drain that had begun tells how long it took.
        starved=row["error"] == OutOfMemory.__name__ and "drain_seconds" in details,
        lost=row["stop_seconds"] + (details.get("waited_seconds") or 0.0),
    )


class History:
    """What is recorded is written by another thread, in order; reads see what was written so far.

    ``observer`` is called, in that thread, when :attr:`trouble` or :attr:`renewals` has changed;
    ``listener`` in any thread, for each event.
    """

    observer: Callable[[], None] | None = None
    listener: Callable[[Event], None] | None = None

    def __init__(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # the database tells that it cannot be reached
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._database = Database(path, self._observe)
        self.suspects = Suspects(self._database)
        rows = self._database.recall(
            "select id, made_for from images where made_for is not null and deleted is null"
        )
        self._made_for: dict[str, str] = {row["id"]: row["made_for"] for row in rows}
        """Keys of schedules, by image: no manifest tells them."""

    @property
    def trouble(self) -> str:
        """Why nothing can be written at the moment; empty while it can."""
        return self._database.trouble

    @property
    def renewals(self) -> int:
        """How many files were of no use and put aside since phosd runs."""
        return self._database.renewals

    def _observe(self) -> None:
        if self.observer is not None:
            self.observer()

    def job(self, job: Job) -> None:
        """A job as it is now, with its phases once it has ended."""
        task, error = job.task, job.error
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
            "result": job.outcome.result,
            "error": error.code if error else "",
            "message": str(error) if error else "",
            "stop_seconds": job.progress.stop_seconds,
            "notes": "\n".join(job.progress.notes),
            "why": job.outcome.why,
            "wrong_guesses": job.progress.wrong_guesses,
            "drained_bytes": job.drained.bytes,
            "drain_rate": job.drained.rate,
            "scheduled": int(task.scheduled),
            "executable": task.executable,
            "process": task.process,
            "details": json.dumps(job.progress.figures.measured()),
        }
        # Phases are timed by the monotonic clock; the history speaks of the time of day.
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

    def interrupted(self, record: JobRecord, settled: str) -> None:
        """A job that an earlier phosd did not survive, and how that was settled."""
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
        }
        self._database.record(lambda db: db["jobs"].upsert(storable(row), pk="id"))
        text = f"{record.operation} {record.target}: {settled}"
        subject = f"job {record.job}"
        self.event(Event("interrupted", subject, text, Severity.WARNING, record.owner))

    def image(
        self, manifest: Manifest, whole: bool | None = None, made_for: Schedule | None = None
    ) -> None:
        """An image; ``whole`` is what a verification of it has just found, ``made_for`` the
        schedule that it belongs to.
        """
        row = _image_row(manifest)
        if whole is not None:
            row |= {"verified": time.time(), "verified_ok": int(whole)}
        if made_for is not None:
            row["made_for"] = self._made_for[manifest.id] = made_for.key
        self._database.record(lambda db: db["images"].upsert(storable(row), pk="id"))

    def reconcile(self, images: Iterable[Manifest]) -> None:
        """These are the images that there are: the manifests are the truth. What is known of each
        besides is kept; schedules have theirs again in a file that was begun anew.
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
        """An image of user id ``owner`` (None: nobody knows) is gone, and why."""
        self.event(Event("image-deleted", image, why, owner=owner))
        self._made_for.pop(image, None)
        row = {"id": image, "deleted": time.time()}
        self._database.record(lambda db: db["images"].upsert(storable(row), pk="id"))

    def images_made_for(self, schedule: Schedule) -> dict[str, bool | None]:
        """The images of a schedule, newest first, and whether they were found whole, if ever."""
        rows = self._database.recall(
            "select id, verified_ok from images where made_for = ? and deleted is null "
            "order by id desc",
            [schedule.key],
        )
        found = {row["id"]: row["verified_ok"] for row in rows}
        return {image: None if ok is None else bool(ok) for image, ok in found.items()}

    def last_made_for(self, schedule: Schedule) -> float:
        """When the latest image of a schedule was made; 0 when there is none."""
        rows = self._database.recall(
            "select created from images where made_for = ? order by id desc limit 1",
            [schedule.key],
        )
        return datetime.fromisoformat(rows[0]["created"]).timestamp() if rows else 0.0

    def schedule(self, schedule: Schedule) -> None:
        """A schedule begins, changes or ends."""
        row = schedule.row()
        key = ("boot_id", "pid", "start_time")
        self._database.record(lambda db: db["schedules"].upsert(storable(row), pk=key))

    def forget_schedules(self, living: Iterable[Schedule]) -> None:
        """Only these processes are still there."""
        keys = {schedule.key for schedule in living}

        def run(db: Any) -> None:
            with db.atomic():
                for row in list(db["schedules"].rows):
                    if Schedule.key_of(row) not in keys:
                        db["schedules"].delete((row["boot_id"], row["pid"], row["start_time"]))

        self._database.record(run)

    def schedules(self) -> list[Row]:
        """Every schedule, of processes that have ended, too."""
        return self._database.recall("select * from schedules")

    def past_checkpoints(self, process: str) -> tuple[PastCheckpoint, ...]:
        """The last checkpoints of a process that were done or failed, the latest first."""
        rows = self._database.recall(
            "select mode, error, wrong_guesses, stop_seconds, details from jobs where process = ? "
            "and operation = 'checkpoint' and state in ('done', 'failed') order by id desc limit ?",
            [process, _REMEMBERED],
        )
        return tuple(_past_checkpoint(row) for row in rows)

    def event(self, event: Event) -> None:
        """Something worth knowing later."""
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
        """Forget jobs, events, deleted images and suspects older than a time."""

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
        """Jobs that an earlier phosd began and never ended have ended now, interrupted."""

        def run(db: Any) -> None:
            with db.atomic():
                db.execute(
                    "update jobs set state = 'interrupted', ended = ? "
                    "where state in ('queued', 'running')",
                    [when],
                )

        self._database.record(run)

    def next_job(self) -> int:
        """A job number that was never used. When the history cannot tell, it is taken from the
        clock: no node does a job every second for years.
        """
        try:
            last = self.query("select coalesce(max(id), 0) as last from jobs")[0]["last"]
        except Internal:
            return int(time.time())
        return 1 + int(last)

    def users(self) -> set[int]:
        """Everybody whose programs had a job."""
        return {row["owner"] for row in self._database.recall("select distinct owner from jobs")}

    def verified(self) -> dict[str, tuple[float, bool]]:
        """When each image was verified last, and whether it was whole."""
        rows = self._database.recall(
            "select id, verified, verified_ok from images where verified not null"
        )
        return {row["id"]: (row["verified"], bool(row["verified_ok"])) for row in rows}

    def query(self, sql: str, params: Any = ()) -> list[Row]:
        """Rows of a statement that reads. Raises :class:`Internal` when the file cannot be read."""
        return self._database.query(sql, params)

    def flush(self) -> None:
        """Wait until everything recorded before is in the file, or cannot be written now."""
        self._database.flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._database.close()
