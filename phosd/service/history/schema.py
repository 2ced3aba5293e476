"""Define the history's tables as migrations. Times are seconds since the epoch, sizes bytes.

Never change a migration that has run somewhere; add a new one.
"""

from typing import Any

from sqlite_utils.migrations import Migrations

migrations = Migrations("phosd")


@migrations()
def m001_tables(db: Any) -> None:
    db["processes"].create(
        {
            "pid": int,
            "start_time": int,
            "boot_id": str,
            "uid": int,
            "command": str,
            "first_seen": float,
            "last_seen": float,
        },
        pk=("boot_id", "pid", "start_time"),
    )
    db["jobs"].create(
        {
            "id": int,
            "operation": str,
            "target": str,
            "owner": int,
            "state": str,
            "started": float,
            "ended": float,
            "mode": str,
            "result": str,
            "error": str,
            "message": str,
            "stop_seconds": float,
            "notes": str,
        },
        pk="id",
    )
    db["jobs"].create_index(["started"])
    db["job_phases"].create(
        {
            "job": int,
            "position": int,
            "name": str,
            "stopped": int,
            "start": float,
            "end": float,
            "bytes": int,
        },
        pk=("job", "position"),
        foreign_keys=[("job", "jobs", "id")],
    )
    db["images"].create(
        {
            "id": str,
            "created": str,
            "owner": int,
            "mode": str,
            "command": str,
            "device_bytes": int,
            "verified": float,
            "verified_ok": int,
            "deleted": float,
        },
        pk="id",
    )
    db["gpu_samples"].create(
        {
            "time": float,
            "uuid": str,
            "memory_used": int,
            "utilisation": float,
            "temperature": float,
            "power": float,
        },
        pk=("uuid", "time"),
    )
    db["kernels"].create(
        {
            "module": str,
            "name": str,
            "summary": str,
            "launches": int,
            "state": str,
        },
        pk=("module", "name"),
    )
    db["events"].create(
        {"id": int, "time": float, "kind": str, "subject": str, "text": str}, pk="id"
    )


@migrations()
def m002_guesses_and_schedules(db: Any) -> None:
    """Add measurements and suspects of concurrent checkpoints, and periodic checkpoints.

    A kernel is keyed by program: a user's executable. ``module`` is the hash of its module, 16 hex
    digits. ``images.made_for`` is the process (boot id, pid, start time) whose schedule made the
    image, and null for an image that a user requested.
    """
    db["kernels"].drop()
    db["kernels"].create(
        {
            "uid": int,
            "executable": str,
            "module": str,
            "name": str,
            "state": str,
            "guessed_wrong": int,
            "first_seen": float,
            "last_seen": float,
        },
        pk=("uid", "executable", "module", "name"),
    )
    db["schedules"].create(
        {
            "boot_id": str,
            "pid": int,
            "start_time": int,
            "uid": int,
            "owner": int,
            "options": str,
            "ended": str,
        },
        pk=("boot_id", "pid", "start_time"),
    )
    for column, kind in (
        ("executable", str),
        ("why", str),
        ("wrong_guesses", int),
        ("drained_bytes", int),
        ("drain_rate", float),
        ("scheduled", int),
        ("details", str),
    ):
        db["jobs"].add_column(column, kind)
    db["images"].add_column("made_for", str)


@migrations()
def m003_jobs_of_a_process(db: Any) -> None:
    """Add ``process``, the process that a job was for, as boot id, pid and start time."""
    db["jobs"].add_column("process", str)
    db["jobs"].create_index(["process"])


@migrations()
def m004_events_of_users(db: Any) -> None:
    """Add an event's severity (null: info) and the user id that it concerns, if any."""
    db["events"].add_column("severity", str)
    db["events"].add_column("owner", int)


@migrations()
def m005_destinations(db: Any) -> None:
    """Add the destination of a job as the caller gave it; null or empty: none."""
    db["jobs"].add_column("destination", str)


@migrations()
def m006_nobody_read_them(db: Any) -> None:
    """Drop tables that were never read. GPU samples are in memory (``ListSamples``) and in
    Prometheus. SQLite reuses the freed pages.
    """
    db["gpu_samples"].drop()
    db["processes"].drop()


@migrations()
def m007_reasons(db: Any) -> None:
    """Add the code of what stood in the way of a job; null or empty: none."""
    db["jobs"].add_column("reason", str)


@migrations()
def m008_rehearsals(db: Any) -> None:
    """Add when the restore of an image was rehearsed last, and why it would fail; empty: it would
    not.
    """
    db["images"].add_column("rehearsed", float)
    db["images"].add_column("rehearsal", str)


@migrations()
def m009_crashes(db: Any) -> None:
    """Add how often in a row a program has crashed soon after its restore from an image."""
    db["images"].add_column("crashes", int)


@migrations()
def m010_names(db: Any) -> None:
    """Add the name of a job's program, and what that is in; null or empty: nothing."""
    db["jobs"].add_column("name", str)
    db["jobs"].add_column("within", str)


@migrations()
def m011_pools(db: Any) -> None:
    """Add pools, and the programs of each, as boot id, pid and start time."""
    db["pools"].create(
        {
            "name": str,
            "owner": int,
            "image": str,
            "hollow": int,
            "most": int,
            "called_name": str,
            "within": str,
        },
        pk="name",
    )
    db["pool_programs"].create(
        {"pool": str, "boot_id": str, "pid": int, "start_time": int, "suspension": str},
        pk=("boot_id", "pid", "start_time"),
    )


@migrations()
def m012_sleepers(db: Any) -> None:
    """Add the programs that sleep until somebody calls them; ``told`` is JSON."""
    db["sleepers"].create(
        {"boot_id": str, "pid": int, "start_time": int, "told": str},
        pk=("boot_id", "pid", "start_time"),
    )


@migrations()
def m013_ready(db: Any) -> None:
    """Add how many programs of a pool wait with their memory on the GPUs."""
    db["pools"].add_column("ready", int, not_null_default=0)


@migrations()
def m014_made_of(db: Any) -> None:
    """Add the image that a job has restored its process from; null or empty: none."""
    db["jobs"].add_column("made_of", str)
    db.execute(
        "update jobs set made_of = target where operation = 'restore' and process is not null"
        " and process != ''"
    )


@migrations()
def m015_tokens(db: Any) -> None:
    """Add the word by which the caller knows a job again; null or empty: none."""
    db["jobs"].add_column("token", str)
    db["jobs"].create_index(["owner", "token"])


@migrations()
def m016_stated_pools(db: Any) -> None:
    """Add whether the configuration says what a pool is."""
    db["pools"].add_column("stated", int, not_null_default=0)
