"""What a recovery waits for is in the log while it waits."""

import logging
import time

import pytest

from phosd.engine.recovery import overdue


def test_a_step_that_takes_long_is_told_while_it_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overdue, "WARNING_SECONDS", 0.05)
    with overdue.overdue("waiting for Godot"):
        end = time.monotonic() + 30
        while not caplog.messages:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert caplog.messages[0] == "recovery: still waiting for Godot"
    assert caplog.messages[1].endswith("s of waiting for Godot")
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_quick_step_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with overdue.overdue("waiting for nobody"):
        pass
    assert not caplog.messages
