"""What the history and the log tell, as records; times as users write them."""

import pytest

from phosd.client.past import event, past_job
from phosd.client.records import Phase
from phosd.tui.past import moment
from tests.support.tui.fakes import NOW

ROW = {
    "id": 12,
    "operation": "checkpoint",
    "target": "4711",
    "owner": 1000,
    "state": "done",
    "started": NOW - 60.0,
    "ended": NOW - 58.0,
    "mode": "concurrent",
    "why": "it is hooked",
    "result": "20270115T080000-5f3a",
    "stop_seconds": 0.84,
    "drained_bytes": 40 << 30,
    "drain_rate": 2e10,
    "wrong_guesses": 1,
    "scheduled": 1,
    "notes": "one\ntwo",
    "phases": [["drain", int(NOW * 1e6), 2.0, 40 << 30, False]],
}


def test_a_row_of_the_history_is_a_job_that_has_ended() -> None:
    job = past_job(ROW)
    assert job.path == "/org/phos/job/_12"
    assert (job.number, job.operation, job.target, job.over) == (12, "checkpoint", "4711", True)
    assert (job.started, job.ended, job.stop_seconds) == (NOW - 60, NOW - 58, 0.84)
    assert (job.drained_bytes, job.drain_rate, job.wrong_guesses) == (40 << 30, 2e10, 1)
    assert (job.notes, job.scheduled) == (("one", "two"), True)
    assert job.phases == (Phase("drain", False, 2.0, 40 << 30, 0),)
    assert not job.cancelable


def test_a_row_of_another_version_is_read_as_far_as_it_goes() -> None:
    row = {"id": "x", "stop_seconds": "long", "phases": [["drain"], 7], "started": None}
    job = past_job(row)
    assert (job.number, job.stop_seconds, job.phases, job.started) == (0, 0.0, (), None)


def test_a_row_of_the_log_is_an_event() -> None:
    row = {"id": 3, "time": int(NOW * 1e6), "severity": "error", "kind": "looking", "text": "t"}
    found = event(row)
    assert (found.number, found.time, found.severity) == (3, NOW, "error")
    assert (found.kind, found.subject, found.text) == ("looking", "", "t")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", NOW - 30), ("2h", NOW - 7200), ("1.5d", NOW - 129_600), ("2027-01-15", 1_799_971_200),
     (" 2027-01-15T08:00:10 ", NOW + 10), ("2027-01-15T08:00:00+00:00", NOW)],
)  # fmt: skip
def test_times_as_one_writes_them(text: str, seconds: float) -> None:
    assert moment(text, NOW) == int(seconds * 1e6)


def test_no_time_is_no_time() -> None:
    assert moment("  ", NOW) is None


@pytest.mark.parametrize(
    "text", ["someday", "5", "7x", "9" * 400 + "d", "0001-01-01", "\x1b[2J", "1.2.3h"]
)
def test_what_is_no_time_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match="write for example 30m"):
        moment(text, NOW)
