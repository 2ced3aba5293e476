"""The node of the core tests, with software GPUs that containers reach, too."""

from pathlib import Path

import pytest

from tests.node.checkpoint_restore.conftest import node, place, undisturbed
from tests.support import containers

__all__ = ["node", "place", "undisturbed"]


@pytest.fixture(autouse=True)
def reached_gpus(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where software GPUs keep their accounts: in the folder that containers see."""
    folder = containers.shared(place) / "softgpu"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setenv("PHOS_SOFTGPU_DIR", str(folder))
