"""Rights: who may export and import what, over the bus."""

import os
import pwd
import subprocess
import threading
import time
from pathlib import Path

import pytest

from phosd.bus import NAME
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.job.checks import Finding
from phosd.engine.job.progress import Progress
from phosd.errors import Cancelled
from phosd.service.config import Config
from phosd.service.jobs.options import ImportRequest
from tests.support.fake_engine import FakeEngine, manifest
from tests.support.harness import wait_until
from tests.support.service import MANAGER, ROOT, Service, serving

STRANGER = pwd.getpwnam("nobody").pw_uid


def outcome(service: Service, job: str) -> str:
    """The state in which a job has ended."""

    def ended() -> str | None:
        state = service.get(job, "Job1", "State").strip('"')
        return None if state in ("running", "queued") else state

    return wait_until(ended, f"the end of {job}")


def test_root_may_export_and_import_everything(service: Service) -> None:
    service.engine.stored["theirs"] = manifest("theirs", owner=STRANGER)
    job = service.start("Export", "ssa{sv}", "theirs", "socket", 0)
    assert outcome(service, job) == "done"
    assert service.engine.requests == [("theirs", 0, os.getuid(), "socket")]
    arguments = ("socket", 3, "owner", "u", STRANGER, "trust", "b", "true", "anyway", "b", "true")
    job = service.start("Import", "sa{sv}", *arguments)
    assert outcome(service, job) == "done"
    request = ImportRequest(owner=STRANGER, trust=True, anyway=True)
    assert service.engine.requests[1:] == [(request, STRANGER, os.getuid(), "socket")]
    assert service.get(job, "Job1", "Result").strip('"') in service.engine.stored


def test_a_user_exports_and_imports_for_themselves(service: Service) -> None:
    service.engine.stored["theirs"] = manifest("theirs", owner=STRANGER)
    service.engine.stored["roots"] = manifest("roots", owner=0)
    for member in ("Import", "TryImport"):
        for more in ((1, "trust", "b", "true"), (1, "owner", "u", 0)):
            with pytest.raises(RuntimeError, match=r"may not import|belongs to"):
                service.call(member, "sa{sv}", "socket", *more, uid=STRANGER)
    with pytest.raises(RuntimeError, match="belongs to uid 0"):
        service.call("Export", "ssa{sv}", "roots", "socket", 0, uid=STRANGER)
    assert service.engine.requests == []
    job = service.start("Export", "ssa{sv}", "theirs", "socket", 0, uid=STRANGER)
    assert outcome(service, job) == "done"
    job = service.start("Import", "sa{sv}", "socket", 0, uid=STRANGER)
    assert outcome(service, job) == "done"
    assert service.engine.requests == [
        ("theirs", STRANGER, STRANGER, "socket"),
        (ImportRequest(), STRANGER, STRANGER, "socket"),
    ]


def test_a_transfer_that_stands_still_holds_up_its_user_only(service: Service) -> None:
    def waits(progress: Progress) -> None:
        while not service.engine.go.wait(0.01):
            progress.check()

    service.engine.act = waits
    service.engine.stored["theirs"] = manifest("theirs", owner=STRANGER)
    jobs = [service.start("Import", "sa{sv}", "socket", 0, uid=STRANGER) for _ in range(3)]
    mine = service.start("Export", "ssa{sv}", "theirs", "socket", 0)
    states = [service.get(job, "Job1", "State").strip('"') for job in (*jobs, mine)]
    assert states == ["running", "queued", "queued", "running"]
    service.engine.go.set()
    assert {outcome(service, job) for job in (*jobs, mine)} == {"done"}


def test_a_dry_run_whose_caller_says_nothing_ends_with_phosd(bus: str, tmp_path: Path) -> None:
    engine, ended = FakeEngine(), threading.Event()
    begun = threading.Event()

    def wait(*arguments: object) -> list[Finding]:
        cancellation = arguments[-1]
        assert isinstance(cancellation, Cancellation)
        begun.set()
        try:
            give_up = time.monotonic() + 120
            while time.monotonic() < give_up:
                cancellation.check()
                time.sleep(0.01)
        except Cancelled:
            ended.set()
            raise
        return []

    engine.try_import = wait  # type: ignore[method-assign,assignment]
    config = Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run")
    config.runtime_dir.mkdir()
    with serving(bus, config, engine):
        words = [*("call", NAME, ROOT, MANAGER, "TryImport", "sa{sv}", "socket", "0")]
        command = ["busctl", f"--address={bus}", *words]
        caller = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with caller:
            assert begun.wait(120)
            caller.kill()
    assert ended.wait(60), "phosd waits for a caller that is gone"
