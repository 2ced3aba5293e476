"""Fixtures of these tests."""

import time
from collections.abc import Iterator

import pytest

from tests.service.running import bus, service

__all__ = ["bus", "service"]


@pytest.fixture(autouse=True)
def same_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Screens look the same wherever the tests run."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()
