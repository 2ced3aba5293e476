"""History and journal: what outlives a daemon."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlite_utils import Database

from phosd import __version__
from phosd.engine.job.checkpoint_history import CheckpointHistory, KernelMark
from phosd.engine.job.figures import Figures
from phosd.engine.job.journal import JobRecord, Journal
from phosd.engine.system.procfs import boot_id
from phosd.errors import Cancelled, Internal, OutOfMemory, PhosError
from phosd.service.history.events import Event
from phosd.service.history.history import History
from phosd.service.history.queries import HistoryOptions, jobs
from phosd.service.history.schema import migrations
from phosd.service.jobs.table import Job, JobState, Outcome, Task
from phosd.service.process_identity import Program
from tests.support.fake_engine import manifest
from tests.support.harness import wait_until
from tests.support.service import phosd


def job(number: int, *, owner: int = 0, started: float = 1000.0) -> Job:
    task = Task("checkpoint", "7", owner, frozenset(), lambda progress: Outcome())
    ended = Job(number, task, started)
    ended.progress.phase("prepare")
    ended.progress.phase("park", stopped=True, bytes_total=10)
    ended.progress.advance(10)
    ended.progress.finish()
    ended.state, ended.ended, ended.outcome = JobState.DONE, started + 1, Outcome("i", "stop")
    return ended


def test_history_keeps_jobs_with_their_phases(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    history.job(job(1))
    history.job(job(2, owner=5))
    history.flush()
    assert [row["id"] for row in jobs(history)] == [2, 1]
    assert [row["id"] for row in jobs(history, owner=5)] == [2]
    assert [row["id"] for row in jobs(history, HistoryOptions(limit=1))] == [2]
    row = jobs(history)[1]
    assert (row["state"], row["result"], row["mode"]) == ("done", "i", "stop")
    phases = history.query("select * from job_phases where job = 1 order by position")
    assert [(p["name"], p["stopped"], p["bytes"]) for p in phases] == [
        ("prepare", 0, 0),
        ("park", 1, 10),
    ]
    assert phases[0]["start"] == pytest.approx(1000.0)
    assert history.next_job() == 3
    history.close()
    again = History(tmp_path / "history.db")
    assert again.next_job() == 3
    again.close()


def test_history_forgets_what_is_old_and_nothing_else(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    history.job(job(1, started=1000.0))
    history.job(job(2, started=5000.0))
    running = job(3, started=1000.0)
    running.ended, running.state = None, JobState.RUNNING
    history.job(running)
    for image in ("here", "gone", "gone lately"):
        history.image(manifest(image))
    history.image_deleted("gone", "because")
    history.image_deleted("gone lately", "because")
    history.flush()
    with closing(sqlite3.connect(tmp_path / "history.db")) as other:
        other.execute("update images set deleted = 2000.0 where id = 'gone'")
        other.commit()
    history.prune(before=3000.0)
    history.flush()
    assert {row["id"] for row in history.query("select id from images")} == {"here", "gone lately"}
    assert [row["id"] for row in jobs(history)] == [3, 2]
    assert {p["job"] for p in history.query("select * from job_phases")} == {2}
    history.close()


def test_history_keeps_images_and_events(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    history.image(manifest("a"), whole=True)
    history.image(manifest("b"))
    history.image(manifest("a"), whole=False)
    history.image_deleted("b", "because")
    history.event(Event("kind", "subject", "text"))
    history.flush()
    assert {k: whole for k, (_, whole) in history.verified().items()} == {"a": False}
    assert [r["text"] for r in history.query("select text from events")] == ["because", "text"]
    assert history.query("select deleted from images where id = 'b'")[0]["deleted"] > 0
    history.close()


def test_migrations_run_once_and_are_recorded(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    for _ in range(2):
        History(path).close()
    database = Database(path)
    assert [m.name for m in migrations.applied(database)] == [
        "m001_tables",
        "m002_guesses_and_schedules",
        "m003_jobs_of_a_process",
        "m004_events_of_users",
        "m005_destinations",
        "m006_nobody_read_them",
        "m007_reasons",
        "m008_rehearsals",
        "m009_crashes",
        "m010_names",
        "m011_pools",
        "m012_sleepers",
        "m013_ready",
        "m014_made_of",
        "m015_tokens",
        "m016_stated_pools",
    ]
    assert {
        "_sqlite_migrations",
        "jobs",
        "job_phases",
        "images",
        "kernels",
        "schedules",
        "events",
        "pools",
        "pool_programs",
        "sleepers",
    } == set(database.table_names())
    assert database.execute("pragma journal_mode").fetchone() == ("wal",)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_history_of_the_first_version_is_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    database: Any = Database(path)
    migrations.apply(database, stop_before="m002_guesses_and_schedules")
    old = {"id": 1, "operation": "checkpoint", "owner": 0, "state": "done", "started": 1.0}
    database["jobs"].insert(old | {"target": "7", "ended": 2.0})
    database["images"].insert({"id": "i", "owner": 0})
    database.conn.commit()
    database.conn.close()
    history = History(path)
    history.job(job(2))
    history.image(manifest("i"), whole=True)
    history.flush()
    assert [row["wrong_guesses"] for row in jobs(history)] == [0, None]
    assert history.verified().keys() == {"i"}
    assert history.suspects.of(Program(0, "/bin/train")) == ()
    history.close()


def test_suspects_are_those_of_a_users_program(tmp_path: Path) -> None:
    odd = os.fsdecode(b"/home/\xff/train")
    mine, theirs = Program(5, odd), Program(6, odd)
    chase, other = KernelMark("chase", 2**64 - 1), KernelMark("other", 0)
    history = History(tmp_path / "history.db")
    history.suspects.found(mine, [chase])
    history.suspects.found(mine, [other, chase])
    history.suspects.found(theirs, [KernelMark("theirs", 1)])
    history.suspects.found(Program(5, "/bin/other"), [KernelMark("else", 1)])
    history.flush()
    assert set(history.suspects.of(mine)) == {chase, other}
    assert history.suspects.of(theirs) == (KernelMark("theirs", 1),)
    assert history.suspects.of(Program(7, odd)) == ()
    rows = history.query(
        "select name, state, guessed_wrong from kernels where uid = 5 and name='chase'"
    )
    assert rows == [{"name": "chase", "state": "suspect", "guessed_wrong": 2}]
    many = [KernelMark(f"kernel{n}", n) for n in range(5000)]
    history.suspects.found(theirs, many[:3000])
    history.suspects.found(theirs, many[3000:])
    history.flush()
    assert len(history.suspects.of(theirs)) == 4096
    assert set(many[3000:]) < set(history.suspects.of(theirs))
    assert set(history.suspects.of(mine)) == {chase, other}
    (seen,) = history.query("select first_seen, last_seen from kernels where name = 'chase'")
    assert seen["first_seen"] < seen["last_seen"]
    history.suspects.trust(mine, [chase, KernelMark("other", 1)])
    history.flush()
    assert history.suspects.of(mine) == (other,)
    assert len(history.suspects.of(theirs)) == 4096
    history.close()


def test_jobs_that_ran_or_waited_when_phosd_died_are_settled(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    for number, state in ((1, JobState.QUEUED), (2, JobState.RUNNING)):
        interrupted = job(number)
        interrupted.state, interrupted.ended = state, None
        history.job(interrupted)
    history.job(job(3))
    history.settle(7.0)
    history.flush()
    rows = jobs(history)
    assert [(r["state"], r["ended"]) for r in rows] == [
        ("done", 1001.0),
        ("interrupted", 7.0),
        ("interrupted", 7.0),
    ]
    assert all("nothing was left to settle" in r["message"] for r in rows[1:])
    history.close()


def test_a_write_that_fails_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    history = History(tmp_path / "history.db")
    with sqlite3.connect(tmp_path / "history.db") as other:
        other.execute(
            "create trigger full before insert on events begin select raise(abort, 'full'); end"
        )
    history.event(Event("lost", "", ""))
    history.job(job(1))
    history.flush()
    assert "could not be written" in caplog.text
    assert len(jobs(history)) == 1
    history.close()


@pytest.mark.parametrize("content", [b"no database at all, but text" * 100, None])
def test_a_damaged_history_is_put_aside(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "history.db"
    if content is None:
        History(path).close()
        whole = path.read_bytes()
        content = whole[:100] + b"\xff" * 4000 + whole[4100:]
    path.write_bytes(content)
    history = History(path)
    history.job(job(1))
    history.flush()
    assert len(jobs(history)) == 1
    history.close()
    (aside,) = (p for p in tmp_path.glob("history.db.damaged-*") if p.name[-4] != "-")
    assert aside.read_bytes() == content
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("history.db-")]


def test_a_journal_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    (tmp_path / "journal").rmdir()
    with pytest.raises(Internal, match=r"cannot be written .* nothing was begun"):
        journal.write(RECORD)


RECORD = JobRecord(
    job=7, operation="checkpoint", target="42", owner=0, started=1.0, boot_id="b", pid=42
)


def test_the_journal_gives_back_what_was_not_finished(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.write(RECORD)
    assert Journal(tmp_path / "journal").interrupted() == [RECORD]
    assert [p.stat().st_mode & 0o777 for p in (tmp_path / "journal").iterdir()] == [0o600]
    journal.remove(7)
    assert journal.interrupted() == []


def test_a_file_of_the_journal_keeps_its_names(tmp_path: Path) -> None:
    """A phosd may find the files of an older one."""
    processes = [{"pid": 42, "start_time": 5, "gpu": True, "hooked": False}]
    affected = {"processes": processes, "gpus": [0], "image": "", "since": 0, "moves": {"0": 1}}
    known = {"job": 7, "operation": "migrate", "target": "42", "owner": 0, "started": 1.0}
    known |= {"boot_id": "b", "pid": 42, "start_time": 5, "concern": affected}
    (tmp_path / "7.json").write_text(json.dumps(known))
    (record,) = Journal(tmp_path).interrupted()
    assert record.affected is not None and record.affected.moves == {0: 1}
    Journal(tmp_path).write(record)
    assert json.loads((tmp_path / "7.json").read_text()) == known | {
        "token": "",
        "phosd": __version__,
    }


@pytest.mark.parametrize("content", [b"", b"{", b'{"job": "x"}', b"\xff" * 100_000])
def test_a_damaged_journal_file_is_kept_and_told(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(tmp_path)
    journal.write(RECORD)
    (tmp_path / "9.json").write_bytes(content)
    assert journal.interrupted() == [RECORD]
    assert "9.json is no journal entry" in caplog.text
    assert (tmp_path / "9.json").exists()


def test_without_a_bus_phosd_says_so(tmp_path: Path) -> None:
    done = phosd(
        "--session",
        f"--state-dir={tmp_path / 's'}",
        f"--runtime-dir={tmp_path / 'r'}",
        DBUS_SESSION_BUS_ADDRESS=f"unix:path={tmp_path}/none",
    )
    assert done.returncode == 1
    assert "no D-Bus at session" in done.stderr


def test_the_real_daemon_settles_what_its_predecessor_left(bus: str, tmp_path: Path) -> None:
    state, runtime = tmp_path / "state", tmp_path / "run"
    state.mkdir(mode=0o700)
    record = JobRecord(12, "checkpoint", "42", 0, time.time(), boot_id(), 42, 1)
    Journal(runtime / "journal").write(record)
    command = [sys.executable, "-m", "phosd.service.main", "--session"]
    command += [f"--state-dir={state}", f"--runtime-dir={runtime}"]
    daemon = subprocess.Popen(
        command,
        env=os.environ | {"DBUS_SESSION_BUS_ADDRESS": bus},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert daemon.stderr is not None
    try:
        wait_until(lambda: "serves org.phos" in daemon.stderr.readline(), "phosd")  # type: ignore[union-attr]
        second = phosd(*command[3:], DBUS_SESSION_BUS_ADDRESS=bus)
        assert second.returncode == 1
        assert "another phosd runs" in second.stderr
    finally:
        daemon.send_signal(signal.SIGTERM)
        _, rest = daemon.communicate(timeout=30)
    assert daemon.returncode == 0, rest
    history = History(state / "history.db")
    (row,) = jobs(history)
    assert (row["id"], row["state"], row["target"]) == (12, "interrupted", "42")
    assert history.next_job() == 13
    assert list((runtime / "journal").iterdir()) == []
    history.close()


def test_what_earlier_checkpoints_of_a_process_came_to(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    mine, drained = "boot/7/70", Figures(waited_seconds=0.5, drain_seconds=3.0)
    history.job(checkpoint_of(1, "concurrent", mine, drained))
    history.job(checkpoint_of(2, "stop", mine))
    history.job(checkpoint_of(3, "stop", "boot/7/71"))  # it had the same pid
    history.job(checkpoint_of(4, "auto", mine, drained, error=OutOfMemory("full")))
    history.job(checkpoint_of(5, "auto", mine, error=OutOfMemory("no host memory")))
    history.job(checkpoint_of(6, "auto", mine, drained, error=Cancelled("cancelled")))
    history.job(checkpoint_of(7, "recopy", mine, drained, wrong=2))
    history.flush()
    assert history.past_checkpoints(mine) == (
        CheckpointHistory.Entry("recopy", guessed_wrong=True, starved=False, lost=0.5),
        CheckpointHistory.Entry("auto", guessed_wrong=False, starved=False, lost=0.0),
        CheckpointHistory.Entry("auto", guessed_wrong=False, starved=True, lost=0.5),
        CheckpointHistory.Entry("stop", guessed_wrong=False, starved=False, lost=0.0),
        CheckpointHistory.Entry("concurrent", guessed_wrong=False, starved=False, lost=0.5),
    )
    for number in range(8, 20):
        history.job(checkpoint_of(number, "stop", mine))
    history.flush()
    assert [e.mode for e in history.past_checkpoints(mine)] == ["stop"] * 8
    history.close()


def test_what_a_process_was_restored_from_is_known_to_the_next_phosd(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    made = Job(1, Task("restore", "image-1", 0, frozenset(), lambda _: Outcome()), 1.0, ended=2.0)
    made.outcome, made.state = Outcome("7", process="boot/7/70", made_of="image-1"), JobState.DONE
    history.job(made)
    history.close()
    history = History(tmp_path / "history.db")
    assert history.restored == {"boot/7/70": "image-1"}
    history.close()


def checkpoint_of(
    number: int,
    mode: str,
    process: str,
    figures: Figures | None = None,
    *,
    error: PhosError | None = None,
    wrong: int = 0,
) -> Job:
    """A job of that process, as it ended."""
    task = Task("checkpoint", "7", 0, frozenset(), lambda _: Outcome(), mode, process=process)
    made = Job(number, task, 1.0, ended=2.0, error=error)
    made.state = JobState.DONE if error is None else JobState.FAILED
    if isinstance(error, Cancelled):
        made.state = JobState.CANCELLED
    made.progress.figures = figures or Figures()
    made.progress.wrong_guesses = wrong
    return made
