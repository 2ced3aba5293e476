"""The node and the targets of the core tests."""

import pytest

from phosd.engine.memory import precopy_rounds
from tests.node.checkpoint_restore.conftest import node, place, start, undisturbed

__all__ = ["node", "place", "start", "undisturbed"]


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets are small: what is not worth a pass for others is worth one for them."""
    monkeypatch.setattr(precopy_rounds, "_LITTLE", 0)
