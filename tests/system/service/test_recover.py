"""Processes that were left standing, set running again over the bus."""

import os
import pwd
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from phosd.engine.job.journal import JobRecord, Journal
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.program import driver_checkpoint
from phosd.engine.recovery import rescue
from phosd.engine.recovery.account import Account
from phosd.engine.recovery.rescue import bring_back
from phosd.engine.system import procfs
from phosd.engine.system.instance_lock import alone
from phosd.errors import Busy, Internal
from tests.support.authority import CHALLENGE, NO, YES, authority
from tests.support.bus import busctl
from tests.support.harness import start, wait_until
from tests.support.service import MANAGER, ROOT, Service
from tests.system.service.test_end_to_end import NAME, phosd
from tests.system.service.test_queries import listed

STRANGER = pwd.getpwnam("nobody").pw_uid
OWNER = pwd.getpwnam("daemon").pw_uid


@pytest.fixture
def target() -> Iterator[int]:
    """A process of a user."""
    with subprocess.Popen(["sleep", "1000"], user=OWNER, group=OWNER, extra_groups=[]) as process:
        yield process.pid
        process.kill()


def test_it_says_what_was_done_and_the_history_knows(service: Service, target: int) -> None:
    done = f"process {target} was given back its parked memory, and runs again"
    assert service.call("Recover", "ua{sv}", target, 0, uid=OWNER) == f's "{done}"'
    assert service.engine.recovered == [target]
    (row,) = listed(service, "ListHistory", "pid", "u", target, "operation", "s", "recover")
    assert (row["state"], row["owner"], row["result"]) == ("done", OWNER, done)
    (event,) = listed(service, "ListEvents", uid=OWNER)
    assert event["text"] == f"recover of {target}: done: {done}"


def test_who_may(service: Service, bus: str, target: int) -> None:
    with pytest.raises(RuntimeError, match=f"process {target} belongs to uid {OWNER}"):
        service.call("Recover", "ua{sv}", target, 0, uid=STRANGER)
    assert service.engine.recovered == []
    service.call("Recover", "ua{sv}", target, 0)
    with authority(bus, NO) as polkit:
        with pytest.raises(RuntimeError, match="may not recover"):
            service.call("Recover", "ua{sv}", target, 0, uid=OWNER)
        polkit.verdicts["org.phos.recover-others"] = CHALLENGE
        with pytest.raises(RuntimeError, match="let polkit ask for a password"):
            service.call("Recover", "ua{sv}", target, 0, uid=STRANGER)
        assert len(service.engine.recovered) == 1
        polkit.verdicts["org.phos.recover-others"] = YES
        service.call("Recover", "ua{sv}", target, 0, uid=STRANGER)
        assert polkit.questions[-1].details == {"pid": str(target), "owner": str(OWNER)}
    assert len(service.engine.recovered) == 2


def test_a_process_that_cannot_be_brought_back(service: Service, target: int) -> None:
    service.engine.trouble = Internal("nobody holds its memory", hint="end it")
    with pytest.raises(RuntimeError, match="nobody holds its memory; end it"):
        service.call("Recover", "ua{sv}", target, 0)
    (row,) = listed(service, "ListHistory")
    assert (row["operation"], row["state"], row["error"]) == ("recover", "failed", "Internal")


def test_calls_that_make_no_sense(service: Service, target: int) -> None:
    with pytest.raises(RuntimeError, match="there is no process 4194305"):
        service.call("Recover", "ua{sv}", 2**22 + 1, 0)
    with pytest.raises(RuntimeError, match="the options of this call are: none"):
        service.call("Recover", "ua{sv}", target, 1, "token", "s", "x")
    assert service.engine.recovered == []


def test_a_job_is_not_disturbed(service: Service) -> None:
    job = service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    with pytest.raises(RuntimeError, match=r"job 1 \(checkpoint .*\) holds process"):
        service.call("Recover", "ua{sv}", os.getpid(), 0)
    assert service.engine.recovered == []
    service.engine.go.set()
    wait_until(lambda: service.get(job, "Job1", "State") == '"done"', "the checkpoint")
    service.call("Recover", "ua{sv}", os.getpid(), 0)


def test_a_job_that_is_not_written_down_yet_is_not_disturbed(tmp_path: Path, target: int) -> None:
    """In the daemon, the engine's own claims count besides the journal."""
    with Node(NodeConfig(tmp_path / "state", tmp_path / "run")) as node:
        with node.claim([target]), pytest.raises(Busy, match=f"works on process {target}"):
            bring_back(target, tmp_path / "run", node.claim)
        assert bring_back(target, tmp_path / "run", node.claim).failures == {}


def test_a_job_that_parks_meanwhile_is_not_disturbed(
    tmp_path: Path, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a running phosd: it writes the job down and parks, while we look who is parked."""
    run, theirs = tmp_path / "run", procfs.process_id(os.getpid())
    run.mkdir()
    freed: list[object] = []

    def park(_: Path) -> set[object]:
        Journal(run / "journal").write(JobRecord(1, "suspend", "", 0, 0.0, "", pid=os.getpid()))
        return {theirs}

    def free(processes: Collection[object], _: Path) -> Account:
        freed.extend(processes)
        return Account()

    monkeypatch.setattr(rescue, "left_parked", park)
    monkeypatch.setattr(rescue, "free", free)
    with alone(run):
        bring_back(target, run)
    assert freed == [procfs.process_id(target)]


def test_the_real_daemon_brings_a_program_back(bus: str, tmp_path: Path) -> None:
    """Another tool has left it locked and checkpointed, which phosd knows nothing of."""
    with phosd(bus, tmp_path):
        target = start("single", tmp_path, runtime=tmp_path / "run")
        try:
            target.wait_for_steps(2)
            call = ("call", NAME, ROOT, MANAGER, "Recover", "ua{sv}", str(target.pid), "0")
            assert "there was nothing to do" in busctl(bus, *call)
            driver_checkpoint.lock(target.pid)
            driver_checkpoint.checkpoint(target.pid)
            assert "brought back from the driver" in busctl(bus, *call)
            target.more_steps(2)
        finally:
            target.kill()
