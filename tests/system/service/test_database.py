"""Trouble with the database: jobs go on, it is told, and what can be known again is."""

import os
import re
import shutil
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from sqlite_utils import Database as Tables

from phosd.engine.system.procfs import ProcessId
from phosd.errors import Internal
from phosd.service.history.database import Database
from phosd.service.history.history import History
from phosd.service.history.queries import jobs
from phosd.service.history.schema import migrations
from phosd.service.jobs.options import CheckpointRequest
from phosd.service.jobs.schedule import Schedule
from phosd.service.process_identity import Target
from tests.support.fake_engine import manifest
from tests.support.harness import wait_until
from tests.support.service import ROOT, Service
from tests.system.service.test_jobs import wait_for
from tests.system.service.test_records import job

OLDER = Path(__file__).parent / "databases"
"""Databases as earlier versions left them: a job that was done, one that never ended, an image."""


def put_aside(path: Path) -> list[Path]:
    """The damaged files that had the name, without their logs."""
    found = path.parent.glob(f"{path.name}.damaged-*")
    return [each for each in found if not each.name.endswith(("-wal", "-shm"))]


class Watched:
    """A database that tries again soon, and counts what it tells."""

    def __init__(self, path: Path) -> None:
        self.told = 0
        self.path = path
        self.file = Database(path, self._tell, again_seconds=0.1)

    def _tell(self) -> None:
        self.told += 1

    def event(self, text: str) -> None:
        row = {"time": 1.0, "kind": "", "subject": "", "text": text}
        self.file.record(lambda tables: tables["events"].insert(row))

    def texts(self) -> list[str]:
        return [row["text"] for row in self.file.query("select text from events order by id")]

    def aside(self) -> list[Path]:
        return put_aside(self.path)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path / "history.db")
    yield made
    made.file.close()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Another process holds the file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("begin exclusive")
        yield
        other.execute("rollback")


def test_what_is_recorded_while_the_file_is_locked_is_written_afterwards(watched: Watched) -> None:
    with locked(watched.path):
        watched.event("a")
        watched.event("b")
        watched.file.flush()  # does not wait for the lock
        assert "cannot be written (database is locked)" in watched.file.trouble
    wait_until(lambda: not watched.file.trouble, "the file to be written again")
    assert watched.texts() == ["a", "b"]
    assert watched.told == 2
    assert watched.aside() == []


def test_a_file_that_is_locked_at_the_start_stops_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    History(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("pragma locking_mode=exclusive")
        other.execute("begin exclusive")
        watched = Watched(path)
        assert "locked" in watched.file.trouble
        with pytest.raises(Internal, match=r"cannot be read \(database is locked\); jobs go on"):
            watched.texts()
        watched.event("a")
    wait_until(lambda: not watched.file.trouble, "the file to be written again")
    watched.file.flush()  # what was recorded last may still be on its way to the writer
    assert watched.texts() == ["a"]
    watched.file.close()


def test_a_job_number_comes_from_the_clock_when_the_history_cannot_tell(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    before = History(path)
    before.job(job(7))
    before.close()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("pragma locking_mode=exclusive")
        other.execute("begin exclusive")
        history = History(path)
        now = int(time.time())
        assert now <= history.next_job() <= now + 60
        assert history.schedules() == []
        assert history.verified() == {}
    history.close()


def empty_the_log(path: Path) -> None:
    """Bring all that was written into the file itself."""
    with closing(sqlite3.connect(path)) as other:
        other.execute("pragma wal_checkpoint(truncate)")


def damage(path: Path) -> None:
    """What a bad disk does, to every page but the first."""
    empty_the_log(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))


def drop_a_table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("drop table job_phases")


def drop_a_column(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("alter table jobs drop column details")


def come_from_the_future(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute(
            "insert into _sqlite_migrations (migration_set, name, applied_at) "
            "values ('phosd', 'm999_wonders', '2099')"
        )
        other.commit()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (damage, "malformed|not a database"),
        (drop_a_table, "lacks .* of its table job_phases"),
        (drop_a_column, "lacks details of its table jobs"),
        (come_from_the_future, r"was made by a newer phosd \(m999_wonders\)"),
    ],
)
def test_a_file_of_no_use_is_kept_and_a_new_one_begun(
    tmp_path: Path,
    spoil: Callable[[Path], None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "history.db"
    first = Watched(path)
    first.event("old")
    first.file.close()
    spoil(path)
    content = path.read_bytes()
    watched = Watched(path)
    watched.event("new")
    watched.file.flush()
    assert watched.texts() == ["new"]
    assert (watched.file.renewals, watched.file.trouble) == (1, "")
    (aside,) = watched.aside()
    assert aside.read_bytes() == content
    assert aside.stat().st_mode & 0o777 == 0o600
    assert [r for r in caplog.records if "kept as" in r.message]
    assert re.search(reason, caplog.text)
    watched.file.close()


def test_damage_that_a_reader_finds_is_mended(watched: Watched) -> None:
    for number in range(200):
        watched.event(f"{number}" * 50)
    watched.file.flush()
    damage(watched.path)
    with pytest.raises(Internal, match="cannot be read"):
        watched.texts()
    wait_until(lambda: watched.file.renewals == 1, "a new file")
    watched.event("new")
    watched.file.flush()
    assert watched.texts() == ["new"]
    assert len(watched.aside()) == 1


def test_a_disk_that_damages_every_file_is_not_filled_with_them(watched: Watched) -> None:
    new = watched.path.with_name("new.db")
    for _ in range(3):
        shutil.copy(OLDER / "m001.db", new)
        come_from_the_future(new)
        empty_the_log(watched.path)  # it would count as the new file's
        new.replace(watched.path)  # at no time is there none: the writer would make one
        watched.event("x")
        watched.file.flush()
    assert len(watched.aside()) == 1
    assert "newer" in watched.file.trouble


def test_only_the_last_files_that_were_put_aside_stay(tmp_path: Path) -> None:
    path = tmp_path / "history.db"
    aside: list[str] = []
    for number in range(5):
        shutil.copy(OLDER / "m001.db", path)
        come_from_the_future(path)
        watched = Watched(path)
        watched.file.close()
        (new,) = {one.name for one in watched.aside()} - {*aside[-3:]}
        aside.append(new)
        path.with_name(f"{new}-wal").write_text(f"the log of {number}")
        path.unlink()
    left = {one.name for one in tmp_path.glob("*damaged*")}
    assert left == {name + suffix for name in aside[-3:] for suffix in ("", "-wal")}


def test_a_folder_that_is_gone_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    watched = Watched(folder / "history.db")
    watched.event("a")
    watched.file.flush()
    folder.rename(tmp_path / "elsewhere")
    watched.event("b")
    watched.file.flush()
    assert "cannot be reached (No such file or directory)" in watched.file.trouble
    (tmp_path / "elsewhere").rename(folder)
    wait_until(lambda: not watched.file.trouble, "the file to be written again")
    assert watched.texts() == ["a", "b"]
    watched.file.close()


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1M,mode=0700", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("this root may not mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk):
        watched = Watched(disk / "history.db")
        watched.event("a")
        watched.file.flush()
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(4096))
        watched.event("b" * 100_000)
        watched.file.flush()
        assert "cannot be written" in watched.file.trouble
        filler.unlink()
        wait_until(lambda: not watched.file.trouble, "room")
        watched.file.close()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        watched = Watched(disk / "history.db")
        watched.event("c")
        watched.file.flush()
        assert "Read-only file system" in watched.file.trouble
        with pytest.raises(Internal, match="cannot be read"):
            watched.texts()
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        wait_until(lambda: not watched.file.trouble, "the disk to be writable")
        assert [text[:1] for text in watched.texts()] == ["a", "b", "c"]
        assert watched.aside() == []
        watched.file.close()


def test_what_a_long_trouble_leaves_in_memory_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phosd.service.history.database._MOST_WAITING", 64)
    watched = Watched(tmp_path / "history.db")
    with locked(watched.path):
        for number in range(100):
            watched.event(f"{number}")
        watched.file.flush()
    wait_until(lambda: not watched.file.trouble, "the file to be written again")
    assert watched.texts() == [f"{number}" for number in range(100 - 64, 100)]
    watched.file.close()


def test_nothing_is_lost_of_what_comes_during_one_slow_write(watched: Watched) -> None:
    """More than may wait while the file is in trouble, which it is not."""
    go_on = threading.Event()

    def blocks(_: Tables) -> None:
        go_on.wait()

    watched.file.record(blocks)
    for number in range(5_000):
        watched.event(f"{number}")
    go_on.set()
    watched.file.flush()
    assert watched.texts() == [f"{number}" for number in range(5_000)]


@pytest.mark.parametrize("name", ["m001.db", "m002.db", "m003.db"])
def test_an_upgrade_keeps_what_an_older_phosd_recorded(tmp_path: Path, name: str) -> None:
    path = tmp_path / "history.db"
    shutil.copy(OLDER / name, path)
    with closing(Tables(path).conn) as before:
        applied = before.execute("select count(*) from _sqlite_migrations").fetchone()[0]
    history = History(path)
    history.settle(7.0)
    history.flush()
    assert (history.trouble, history.renewals) == ("", 0)
    assert [(row["id"], row["state"]) for row in jobs(history)] == [
        (42, "interrupted"),
        (41, "done"),
    ]
    assert history.next_job() == 43
    assert history.verified()["20261001T101112-abcd"][1]
    assert history.query("select text from events") == [{"text": "every 60 s"}]
    history.job(job(43))
    history.flush()
    assert [row["id"] for row in jobs(history)] == [43, 42, 41]
    history.close()
    with closing(Tables(path).conn) as after:
        now = after.execute("select count(*) from _sqlite_migrations").fetchone()[0]
    everything = len(migrations.pending(Tables(memory=True)))
    assert applied == int(name[1:4]) < now == everything


def test_the_table_of_images_is_as_the_manifests_say(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    history.image(manifest("a"), whole=True)
    history.image(manifest("gone"))
    history.reconcile([manifest("a"), manifest("b", owner=5)])
    history.flush()
    rows = history.query("select id, owner, verified_ok, deleted from images order by id")
    assert [(r["id"], r["owner"], r["verified_ok"], bool(r["deleted"])) for r in rows] == [
        ("a", 0, 1, False),
        ("b", 5, None, False),
        ("gone", 0, None, True),
    ]
    history.close()


@pytest.mark.timing(why="how late calls are answered beside a database that is locked")
def test_a_service_goes_on_beside_a_database_in_trouble(service: Service) -> None:
    path = service.config.state_dir / "history.db"
    service.engine.go.set()
    wait_for(service, service.start("Checkpoint", "ua{sv}", os.getpid(), 0), "done")
    assert service.get(ROOT, "Manager1", "Troubles") == "0"
    with locked(path):
        took = []
        for _ in range(3):
            began = time.monotonic()
            job = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
            service.get(job, "Job1", "State")
            took.append(time.monotonic() - began)
            wait_for(service, job, "done")
        wait_until(
            lambda: "database is locked" in service.get(ROOT, "Manager1", "Troubles"), "the trouble"
        )
        # SQLite's wait for the lock is not on the loop: it would delay each of them.
        assert min(took) < 1.5
    wait_until(lambda: service.get(ROOT, "Manager1", "Troubles") == "0", "its end")
    assert service.call("ListHistory", "a{sv}", 0).count('"checkpoint"') == 4


def meet_the_damage(service: Service) -> None:
    """Make the service read its damaged history, unless what it was still writing met it first."""
    path = service.config.state_dir / "history.db"
    try:
        service.call("ListHistory", "a{sv}", 0)
    except RuntimeError as refused:
        assert "cannot be read" in str(refused)
    wait_until(lambda: put_aside(path), "the damaged file aside")


def test_a_service_whose_database_is_damaged_knows_its_images_again(service: Service) -> None:
    path = service.config.state_dir / "history.db"
    service.engine.go.set()
    wait_for(service, service.start("Checkpoint", "ua{sv}", os.getpid(), 0), "done")
    wait_for(service, service.start("VerifyImage", "sa{sv}", "image-0", 0), "done")
    service.history.flush()  # what comes later would be written beside the damage
    damage(path)
    meet_the_damage(service)

    def known() -> bool:
        try:
            with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True)) as other:
                found = other.execute("select id, verified_ok from images").fetchall()
        except sqlite3.OperationalError:  # it is being made
            return False
        return bool(found == [("image-0", None)])

    wait_until(known, "the image to be known again")
    wait_for(service, service.start("Checkpoint", "ua{sv}", os.getpid(), 0), "done")
    assert service.call("ListHistory", "a{sv}", 0).count('"checkpoint"') == 1
    assert "history.db was damaged" in " ".join(
        row[0] for row in sqlite3.connect(path).execute("select text from events").fetchall()
    )


def test_a_database_begun_anew_has_the_schedules_and_their_images_again(service: Service) -> None:
    path = service.config.state_dir / "history.db"
    service.engine.go.set()
    every = ("ua{sv}", os.getpid(), 2, "every", "d", "3600", "keep", "u", "2")
    wait_for(service, service.start("Checkpoint", *every), "done")
    wait_for(service, service.start("Checkpoint", "ua{sv}", os.getpid(), 0), "done")

    def kept() -> list[list[tuple[object, ...]]]:
        questions = ("select * from schedules", "select id, made_for from images order by id")
        try:
            with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True)) as other:
                return [other.execute(question).fetchall() for question in questions]
        except sqlite3.DatabaseError:  # it is damaged, or being made
            return []

    wait_until(lambda: [len(rows) for rows in kept()] == [1, 2], "all to be recorded")
    before = kept()
    ((_, made_for), (_, by_hand)) = before[1]
    assert made_for
    assert by_hand is None
    service.history.flush()
    damage(path)
    meet_the_damage(service)
    wait_until(lambda: kept() == before, "the schedule and its image in the new file")
    assert len(put_aside(path)) == 1


def test_what_a_deleted_image_was_made_for_is_forgotten(tmp_path: Path) -> None:
    history = History(tmp_path / "history.db")
    schedule = Schedule("boot", Target(ProcessId(7, 1), 0), 0, CheckpointRequest(every=60.0))
    for image in ("a", "b"):
        history.image(manifest(image), made_for=schedule)
    history.image_deleted("a", "because")
    history.close()
    again = History(tmp_path / "history.db")
    with closing(sqlite3.connect(tmp_path / "history.db")) as other:
        other.execute("update images set made_for = null")
        other.commit()
    again.reconcile([manifest("a"), manifest("b")])
    again.flush()
    assert list(again.images_made_for(schedule)) == ["b"]
    again.close()
