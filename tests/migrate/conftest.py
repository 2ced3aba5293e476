"""The node and the targets of the core tests."""

import pytest

from phosd.engine import passes
from tests.core.conftest import node, place, start, undisturbed

__all__ = ["node", "place", "start", "undisturbed"]


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets are small: what is not worth a pass for others is worth one for them."""
    monkeypatch.setattr(passes, "_LITTLE", 0)
