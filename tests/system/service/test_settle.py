"""What an earlier phosd left: told in the history, or kept for the next start."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from phosd.engine.job.affected import InterruptedJob
from phosd.engine.job.journal import JobRecord, Journal, read_records
from phosd.engine.system.procfs import boot_id
from phosd.errors import Timeout
from tests.support.fake_engine import FakeEngine
from tests.support.service import Service


def test_what_cannot_be_settled_stays_and_others_are_served(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = JobRecord(7, "checkpoint", "42", 0, 1.0, boot_id())

    def fail(_: FakeEngine, interrupted: Sequence[InterruptedJob]) -> dict[int, str]:
        Journal(tmp_path / "run" / "journal").write(left)
        raise Timeout("the data mover says nothing", hint="see its log")

    monkeypatch.setattr(FakeEngine, "settle", fail)
    service: Service = request.getfixturevalue("service")
    assert service.call("ListImages")
    assert read_records(tmp_path / "run" / "journal") == [left]
    assert "is not settled: the data mover says nothing" in caplog.text
