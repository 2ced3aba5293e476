"""A stopped process is waited for only a moment, and by one step of a job, not by each."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from phosd.engine.system import stopped_state
from phosd.errors import Busy
from tests.support.harness import halt, wait_until

LATE = 60.0
"""Seconds that are over only if somebody waits in vain."""


@pytest.fixture
def pid(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(stopped_state, "TIMEOUT", 0.3)
    with subprocess.Popen(["/bin/sleep", "600"]) as process:
        yield process.pid
        process.kill()


def test_who_stands_still_is_told_with_what_to_do(pid: int) -> None:
    stopped_state.await_going(pid)
    halt(pid)
    began = time.monotonic()
    with pytest.raises(Busy, match=f"process {pid} is stopped") as raised:
        stopped_state.await_going(pid)
    assert time.monotonic() - began >= 0.3
    assert f"kill -CONT {pid}" in raised.value.hint and f"phos recover {pid}" in raised.value.hint
    with pytest.raises(Busy):  # at once: it has been waited for
        stopped_state.require_going(pid)
    os.kill(pid, signal.SIGCONT)
    stopped_state.await_going(pid)
    halt(pid)
    assert not stopped_state.require_going(pid), "it has gone on since, and may do so again"


def test_who_goes_on_in_time_is_waited_for(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped_state, "TIMEOUT", LATE)
    halt(pid)
    threading.Timer(0.3, os.kill, (pid, signal.SIGCONT)).start()
    stopped_state.await_going(pid)


def test_an_answer_and_an_error_are_passed_on(pid: int) -> None:
    assert stopped_state.answer(pid, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        stopped_state.answer(pid, lambda: 1 // 0)


def test_who_stops_in_the_middle_is_left(pid: int) -> None:
    """What it was asked is still asked."""
    goes_on, answered = threading.Event(), threading.Event()

    def ask() -> None:
        halt(pid)
        goes_on.wait(LATE)
        answered.set()

    with pytest.raises(Busy, match=f"process {pid} is stopped"):
        stopped_state.answer(pid, ask)
    assert not answered.is_set() and stopped_state.is_asked(pid)
    goes_on.set()
    assert answered.wait(LATE)
    wait_until(lambda: not stopped_state.is_asked(pid), "the end of who was left behind")


def test_who_has_ended_is_nobody_to_wait_for() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    stopped_state.await_going(gone.pid)
