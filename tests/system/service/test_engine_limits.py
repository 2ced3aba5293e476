"""What the configuration limits is limited in each operation of the service's engine."""

from pathlib import Path
from typing import Any

import pytest

from phosd.engine.job.progress import Progress
from phosd.engine.operations.admission import DiskLimits
from phosd.service.config import Config
from phosd.service.jobs.options import SuspendRequest
from phosd.service.tasks import local_engine
from phosd.service.tasks.local_engine import NodeEngine


class Seen(Exception):
    """Ends an operation once its options are known."""


def test_suspending_has_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = DiskLimits(quota=lambda user: 7)
    engine = NodeEngine(Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run"))
    engine.limit(limits)
    found: list[DiskLimits] = []

    def operation(_node: object, *arguments: Any) -> None:
        found.append(arguments[-2].limits)
        raise Seen

    for name in ("suspend", "swap"):
        monkeypatch.setattr(local_engine, name, operation)
    try:
        for call in (
            lambda: engine.suspend(1, SuspendRequest(), 0, Progress()),
            lambda: engine.swap(1, 2, SuspendRequest(), 0, Progress()),
        ):
            with pytest.raises(Seen):
                call()
    finally:
        engine.close()
    assert found == [limits, limits]
