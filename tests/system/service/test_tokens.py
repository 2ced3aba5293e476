"""A call that is repeated with its token by a client that did not hear of the first: the job is the
one of before, also after a restart of phosd.
"""

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from phosd.engine.job.affected import InterruptedJob
from phosd.engine.job.journal import JobRecord, Journal, read_records
from phosd.engine.system.procfs import boot_id
from phosd.errors import OutOfSpace
from phosd.service.config import Config
from tests.support.bus import busctl
from tests.support.fake_engine import FakeEngine, manifest
from tests.support.harness import wait_until
from tests.support.service import Service, serving
from tests.system.service.test_jobs import STRANGER, wait_for

CHECKPOINT = ("Checkpoint", "ua{sv}", os.getpid(), 1, "token", "s", "once")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "run").mkdir()
    return Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run", rescan_seconds=0.5)


def told(service: Service, job: str) -> dict[str, str]:
    names = ("Number", "Operation", "Target", "State", "Result", "Mode", "Error", "Message")
    return {name: service.get(job, "Job1", name) for name in (*names, "Started", "Ended", "Notes")}


def cancel(service: Service, job: str) -> None:
    busctl(service.address, "call", "org.phos", job, "org.phos.Job1", "Cancel", "a{sv}", "0")


def ready() -> FakeEngine:
    engine = FakeEngine()
    engine.go.set()
    return engine


def test_what_was_done_is_not_done_again(bus: str, config: Config) -> None:
    engine = ready()
    with serving(bus, config, engine) as service:
        job = service.start(*CHECKPOINT)
        wait_for(service, job, "done")
        before = told(service, job)
        phases = service.get(job, "Job1", "Phases").count('"')
        stopped = float(service.get(job, "Job1", "StopSeconds"))
    with serving(bus, config, engine) as service:
        service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
        assert service.start(*CHECKPOINT) == job
        assert told(service, job) == before
        assert service.get(job, "Job1", "Phases").count('"') == phases > 0
        assert float(service.get(job, "Job1", "StopSeconds")) == pytest.approx(stopped, abs=0.01)
        assert service.start(*CHECKPOINT) == job
        with pytest.raises(RuntimeError, match="token 'once' belongs to job 1 "):
            service.call("Restore", "sa{sv}", "image-0", 1, "token", "s", "once")
        with pytest.raises(RuntimeError, match="has ended already"):
            cancel(service, job)
        other = service.start("Checkpoint", "ua{sv}", os.getpid(), 1, "token", "s", "other")
        assert other not in (job, "/org/phos/job/_2")
    assert len(engine.stored) == 3


def test_what_failed_is_told_again(
    bus: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> str:
        raise OutOfSpace("the disk is full", hint="make room")

    engine = ready()
    with serving(bus, config, engine) as service, monkeypatch.context() as patch:
        patch.setattr(engine, "checkpoint", full)
        job = service.start(*CHECKPOINT)
        wait_for(service, job, "failed")
        before = told(service, job)
    with serving(bus, config, engine) as service:
        assert service.start(*CHECKPOINT) == job
        assert told(service, job) == before
        assert before["Error"] == '"OutOfSpace"' and "disk is full" in before["Message"]
    assert not engine.stored


def test_what_phosd_did_not_survive_has_failed(
    bus: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client learns what has come of it, and then decides what to do."""

    def settle(_: FakeEngine, interrupted: Sequence[InterruptedJob]) -> dict[int, str]:
        return {each.job: "its program runs on" for each in interrupted}

    monkeypatch.setattr(FakeEngine, "settle", settle)
    me = os.getpid()
    left = JobRecord(41, "checkpoint", str(me), 0, time.time(), boot_id(), me, token="once")
    Journal(config.runtime_dir / "journal").write(left)
    engine = ready()
    with serving(bus, config, engine) as service:
        job = service.start(*CHECKPOINT)
        assert job == "/org/phos/job/_41"
        assert service.get(job, "Job1", "State") == '"failed"'
        assert service.get(job, "Job1", "Error") == '"Internal"'
        message = service.get(job, "Job1", "Message")
        assert "phosd ended while the job ran; its program runs on" in message
    assert not engine.stored


def test_an_end_that_is_not_recorded_is_no_failure(bus: str, config: Config) -> None:
    """The client is to ask again; figures that nobody can read are left out."""
    engine = ready()
    with serving(bus, config, engine) as service:
        job = service.start(*CHECKPOINT)
        wait_for(service, job, "done")
        wait_until(lambda: not read_records(config.runtime_dir / "journal"), "it to be written")
    history = config.state_dir / "history.db"
    _change(history, "update jobs set state = 'running', details = '['")
    with serving(bus, config, engine) as service:
        assert service.start(*CHECKPOINT) == job, "an earlier phosd has not ended it"
        assert service.get(job, "Job1", "State") == '"failed"'
    with serving(bus, config, engine) as service:
        _change(history, "update jobs set state = 'running'")
        with pytest.raises(RuntimeError, match="what has come of job 1 is not in the history yet"):
            service.start(*CHECKPOINT)
        _change(history, "update jobs set state = 'done'")
        assert service.start(*CHECKPOINT) == job
        assert service.get(job, "Job1", "Details") == "0"
    assert len(engine.stored) == 1


def _change(history: Path, how: str) -> None:
    with closing(sqlite3.connect(history)) as database, database:
        database.execute(how)


def test_another_user_s_token_is_another_one(bus: str, config: Config) -> None:
    engine = ready()
    with serving(bus, config, engine) as service:
        wait_for(service, service.start(*CHECKPOINT), "done")
    engine.stored["theirs"] = manifest("theirs", owner=STRANGER)
    with serving(bus, config, engine) as service:
        words = ("VerifyImage", "sa{sv}", "theirs", 1, "token", "s", "once")
        job = service.start(*words, uid=STRANGER)
        assert service.get(job, "Job1", "Operation") == '"verify"'
