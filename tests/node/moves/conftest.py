"""The node and the targets of the core tests."""

import pytest

from phosd.engine.memory import precopy_rounds
from phosd.engine.program import driver_checkpoint
from phosd.engine.system import procfs
from tests.node.checkpoint_restore.conftest import node, place, start, undisturbed

__all__ = ["node", "place", "start", "undisturbed"]


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets are small: what is not worth a pass for others is worth one for them."""
    monkeypatch.setattr(precopy_rounds, "_LITTLE", 0)


@pytest.fixture
def unlocked_when_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is unlocked that has a thread that is held or stopped: it may have a lock that the
    driver then waits for.
    """
    unlock = driver_checkpoint.unlock

    def unlocking(pid: int) -> None:
        found = [thread for each in procfs.threads(pid) if (thread := procfs.stat(each))]
        assert not any(thread.stopped for thread in found) and not procfs.tracer(pid)
        unlock(pid)

    monkeypatch.setattr(driver_checkpoint, "unlock", unlocking)
