"""The clock is set while phosd runs: nothing is lost, and nothing waits for ever."""

import os
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phosd.engine.image.writer import next_id
from phosd.service import clock
from phosd.service.jobs.job import Job, JobState, Outcome, Task
from tests.support.harness import wait_until
from tests.support.service import Service

YEARS = 10 * 365 * 86_400.0
IDS = st.from_regex(
    r"20[0-9]{2}(0[1-9]|1[0-2])(0[1-9]|1[0-9])T0[0-9]{3}[0-5][0-9]-[0-9a-f]{4}", fullmatch=True
)
IDS = IDS.filter(lambda text: text[11:13] < "60")


def wall(jump: Callable[[], float]) -> SimpleNamespace:
    """The module ``time`` with a wall clock that was set by ``jump`` seconds."""
    return SimpleNamespace(**vars(time) | {"time": lambda: time.time() + jump()})


@pytest.mark.parametrize("jump", [-YEARS, YEARS])
def test_a_job_takes_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    job = Job(1, Task("checkpoint", "1", 0, frozenset(), lambda progress: Outcome()), time.time())
    job.begin()
    monkeypatch.setattr("phosd.service.jobs.job.time", wall(lambda: jump))
    job.end(JobState.DONE)
    assert job.ended is not None
    assert 0 <= job.ended - job.started < 60


def test_a_clock_that_is_set_ahead_makes_nothing_old(monkeypatch: pytest.MonkeyPatch) -> None:
    before = time.time()
    assert abs(clock.age_clock() - before) < 60
    monkeypatch.setattr("phosd.service.clock.time", wall(lambda: YEARS))
    assert abs(clock.age_clock() - before) < 60
    monkeypatch.setattr("phosd.service.clock.time", wall(lambda: -YEARS))
    assert clock.age_clock() < before - YEARS / 2


@given(st.lists(IDS | st.just("lost+found"), max_size=5), st.integers(0, 2**32))
def test_an_id_sorts_behind_all_that_there_are(others: list[str], now: int) -> None:
    made = next_id(others, now)
    assert len(made) == 20
    assert all(made > other for other in others if other != "lost+found")
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(now))
    if all(other < stamp for other in others if other != "lost+found"):
        assert made.startswith(stamp)


def test_the_last_of_a_second_is_followed_by_the_next_second() -> None:
    assert next_id(["20301231T235959-ffff"], 0) == "20310101T000000-0000"
    assert next_id(["20301231T235959-00ff", "20301231T235959-000f"], 0) == "20301231T235959-0100"


def test_periodic_checkpoints_keep_their_pace(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumps = iter(range(1, 1000))
    monkeypatch.setattr(
        "phosd.service.tasks.periodic.time", wall(lambda: YEARS * (-1) ** next(jumps))
    )
    service.engine.go.set()
    begin = time.monotonic()
    service.call("Checkpoint", "ua{sv}", os.getpid(), 2, "every", "d", 1, "keep", "u", 9)
    wait_until(lambda: service.engine.made >= 3, "three images")
    assert time.monotonic() - begin >= 1.9
