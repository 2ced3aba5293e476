"""Fixtures of these tests."""

import time
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def same_everywhere(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Screens look the same wherever the tests run, and however fast."""
    if "bus" not in request.fixturenames:  # what a node was made with stays
        monkeypatch.setattr("phosd.tui.app._SAMPLE_SECONDS", 1e6)
        monkeypatch.setattr("phosd.tui.app._SURVEY_SECONDS", 1e6)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()
