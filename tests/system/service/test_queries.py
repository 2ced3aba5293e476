"""What the history tells over the bus: jobs with their phases, and events, of whoever may know."""

import asyncio
import json
import os
import pwd
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from phosd.bus import NAME, Connection, Signal
from phosd.client import rows
from phosd.engine.job.checkpoint_history import KernelMark
from phosd.engine.job.journal import JobRecord
from phosd.engine.job.progress import Progress
from phosd.engine.program.process import GpuProcess
from phosd.errors import Busy, PhosError, Unsupported
from phosd.service.history import queries
from phosd.service.history.events import Event, Severity, of_end
from phosd.service.history.history import History
from phosd.service.history.queries import EventOptions, HistoryOptions
from phosd.service.jobs.table import Job, JobState, Outcome, Task
from tests.support.bus import busctl
from tests.support.fake_engine import manifest
from tests.support.harness import wait_until
from tests.support.service import MANAGER, ROOT, Service

STRANGER = pwd.getpwnam("nobody").pw_uid
SECOND = 1_000_000


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    made = History(tmp_path / "history.db")
    yield made
    made.close()


def job(
    number: int,
    operation: str = "checkpoint",
    target: str = "7",
    *,
    result: str = "",
    owner: int = 0,
    error: PhosError | None = None,
) -> Job:
    """A job that began at second 1000 + its number and took one."""
    task = Task(operation, target, owner, frozenset(), lambda _: Outcome())
    made = Job(number, task, 1000.0 + number, ended=1001.0 + number, error=error)
    made.state = JobState.FAILED if error else JobState.DONE
    made.outcome = Outcome(result)
    return made


def listed(service: Service, member: str, *options: object, uid: int = 0) -> list[dict[str, Any]]:
    """The rows of a list; options are ``name type value`` each."""
    words = ["a{sv}", str(len(options) // 3), *map(str, options)]
    reply = busctl(
        service.address,
        "--json=short",
        "call",
        NAME,
        ROOT,
        MANAGER,
        member,
        *words,
        uid=uid or None,
    )
    (rows,) = json.loads(reply)["data"]
    return [{name: value["data"] for name, value in row.items()} for row in rows]


def test_jobs_by_process_operation_state_and_time(history: History) -> None:
    history.job(job(1))
    history.job(job(2, target="77"))
    history.job(job(3, "restore", "image-7", result="7"))
    history.job(job(4, "verify", "7", result="7"))  # an image may be called like a process
    history.job(job(5, error=Busy("busy")))
    history.job(job(6, "recover", owner=5))
    history.job(job(7, "swap", "8 77"))
    history.flush()

    def found(owner: int | None = None, **wanted: Any) -> list[int]:
        return [row["id"] for row in queries.jobs(history, HistoryOptions(**wanted), owner)]

    assert found() == [7, 6, 5, 4, 3, 2, 1]
    assert found(pid=77) == [7, 2]
    assert found(pid=8) == found(operation="swap") == [7]
    assert found(pid=7) == [6, 5, 3, 1]
    assert found(pid=7, owner=5) == [6]
    assert found(operation="restore") == [3]
    assert found(state="failed") == [5]
    assert found(state="failed", operation="restore") == []
    assert found(since=1003 * SECOND) == [7, 6, 5, 4, 3]
    assert found(since=1003 * SECOND + 1) == [7, 6, 5, 4]
    assert found(until=1003 * SECOND) == [3, 2, 1]
    assert found(since=1002 * SECOND, until=1004 * SECOND, limit=2) == [4, 3]


def test_the_pages_together_are_one_call(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_PAGE", 3)
    for number in range(1, 12):
        history.job(job(number, target="77" if number % 3 else "7"))
    calls: list[int] = []

    def found(**wanted: Any) -> list[Any]:
        asked: dict[str, Any] | None = rows.first_page(wanted)
        told: list[Any] = []
        while asked is not None:
            page = queries.jobs(history, HistoryOptions(**asked))
            calls.append(len(page))
            told += page
            asked = rows.next_page(asked, page, wanted["limit"] - len(told))
        return told

    for limit in range(1, 13):
        assert found(limit=limit) == queries.jobs(history, HistoryOptions(limit=limit))
        assert found(limit=limit, pid=77) == queries.jobs(
            history, HistoryOptions(limit=limit, pid=77)
        )
    assert max(calls) == 3
    calls.clear()
    assert [row["id"] for row in found(limit=7)] == [11, 10, 9, 8, 7, 6, 5]
    assert calls == [3, 3, 1]


def test_a_time_that_was_told_finds_its_job(history: History) -> None:
    """Seconds are floats there and microseconds integers here."""
    begun = [1.7e9 + n / 7 for n in range(200)]
    for number, started in enumerate(begun, 1):
        late = job(number)
        late.started = started
        history.job(late)
    history.flush()
    for number, started in enumerate(begun, 1):
        told = int(started * 1e6)
        (row,) = queries.jobs(history, HistoryOptions(since=told, until=told))
        assert row["id"] == number


def test_the_phases_of_jobs(history: History) -> None:
    both = [job(1), job(2)]
    for each in both:
        each.progress.phase("prepare")
        each.progress.phase("park", stopped=True, bytes_total=10)
        each.progress.advance(each.number)
        each.progress.finish()
        first, second = each.progress.phases
        first.start, first.end = 5.0, 5.25
        second.start, second.end = 5.25, 6.0
        history.job(each)
    history.job(job(3))
    history.flush()
    found = queries.phases(history, queries.jobs(history))
    assert found == {
        n: [
            ["prepare", (1000 + n) * SECOND, 0.25, 0, False],
            ["park", (1000 + n) * SECOND + 250_000, 0.75, n, True],
        ]
        for n in (1, 2)
    }
    assert queries.phases(history, queries.jobs(history, HistoryOptions(limit=1))) == {}


def test_history_over_the_bus_has_a_timeline(service: Service) -> None:
    service.engine.go.set()
    service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    service.engine.stored["i"] = manifest("i")
    service.start("VerifyImage", "sa{sv}", "i", 0)
    wait_until(
        lambda: [row["state"] for row in listed(service, "ListHistory")] == ["done", "done"],
        "both jobs",
    )
    (row,) = listed(service, "ListHistory", "pid", "u", os.getpid(), "state", "s", "done")
    phases = row["phases"]
    assert [(phase[0], phase[4]) for phase in phases] == [
        ("prepare", False),
        ("quiesce", True),
        ("publish", False),
    ]
    assert abs(phases[0][1] - row["started"] * 1e6) < 10
    assert all(a[1] <= b[1] for a, b in pairwise(phases))
    assert sum(phase[2] for phase in phases) <= row["ended"] - row["started"] + 0.001
    (row,) = listed(service, "ListHistory", "operation", "s", "verify")
    assert row["target"] == "i"
    assert listed(service, "ListHistory", uid=STRANGER) == []
    assert listed(service, "ListHistory", "since", "t", int((time.time() + 60) * 1e6)) == []


@pytest.mark.parametrize(
    "option",
    [
        ("pid", "u", 0),
        ("state", "s", "odd"),
        ("operation", "s", ""),
        ("since", "s", "now"),
        ("until", "d", 1.5),
        ("until", "t", 2**64 - 1),
        ("limit", "u", 10_001),
    ],
)
def test_filters_that_make_no_sense(service: Service, option: tuple[object, ...]) -> None:
    said = "the options of this call are: limit, pid, operation|is one of: .*(done|checkpoint), "
    said += f"|{option[0]} has to be a whole number, at least"
    with pytest.raises(RuntimeError, match=said):
        listed(service, "ListHistory", *option)


def test_events_by_owner_severity_and_time(history: History) -> None:
    before = int(time.time() * 1e6)
    for number, severity in enumerate(Severity):
        history.event(Event("kind", f"{number}", "text", severity, owner=number or None))

    def found(owner: int | None = None, **wanted: Any) -> list[str]:
        return [row["subject"] for row in queries.events(history, EventOptions(**wanted), owner)]

    assert found() == ["2", "1", "0"]
    assert found(severity="warning") == ["2", "1"]
    assert found(severity="error") == ["2"]
    assert found(limit=1) == ["2"]
    assert found(owner=1) == ["1"]
    assert found(owner=7) == []
    (one,) = queries.events(history, EventOptions(), 1)
    assert (one["kind"], one["text"], one["severity"]) == ("kind", "text", "warning")
    assert before <= one["time"] <= time.time() * 1e6
    assert found(since=one["time"])[-1] in ("0", "1")
    assert found(since=int((time.time() + 60) * 1e6)) == []


def test_events_do_not_fill_the_disk(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phosd.service.history.history._MOST_EVENTS", 3)
    for number in range(10):
        history.event(Event("kind", f"{number}", "text"))
    history.prune(before=0.0)
    assert [row["subject"] for row in queries.events(history)] == ["9", "8", "7"]


def test_what_a_job_that_ended_is_told_as() -> None:
    (done,) = of_end(job(3, result="image-0", owner=5))
    assert done == Event("job", "job 3", "checkpoint of 7: done: image-0", Severity.INFO, 5)
    failed = job(4, owner=5, error=Busy("another job", hint="wait"))
    failed.progress.found_suspects([KernelMark(f"kernel{n}", n) for n in range(12)])
    end, wrong = of_end(failed)
    assert end.text == "checkpoint of 7: failed: another job; wait"
    assert (end.severity, wrong.severity) == (Severity.WARNING, Severity.WARNING)
    assert (wrong.kind, wrong.owner) == ("wrong-guess", 5)
    assert "(wrong guesses: 1); suspects: kernel0, " in wrong.text
    assert wrong.text.endswith("kernel9 and 2 more")
    failed.progress.found_suspects([KernelMark("proven", 1)], disproved=True)
    *_, bug = of_end(failed)
    assert (bug.kind, bug.severity, bug.owner) == ("wrong-analysis", Severity.ERROR, 5)
    assert "which is a bug" in bug.text and bug.text.endswith("one of these: proven")


def test_an_interrupted_job_is_an_event_of_its_owner(history: History) -> None:
    record = JobRecord(12, "checkpoint", "42", 5, time.time(), "boot", 42, 1)
    history.interrupted(record, "its processes run")
    (event,) = queries.events(history, EventOptions(), 5)
    assert (event["kind"], event["subject"]) == ("interrupted", "job 12")
    assert "its processes run" in event["text"]


def test_events_over_the_bus(service: Service) -> None:
    """Everybody hears that something happened, and only those whom it concerns hear what."""
    heard: list[Signal] = []

    def wrong(progress: Progress) -> None:
        progress.found_suspects([KernelMark("secret_kernel", 1)])

    service.engine.act = wrong
    service.engine.go.set()
    service.engine.stored["theirs"] = manifest("theirs", owner=STRANGER)

    def news() -> list[Signal]:
        """What was heard of the job: that phosd begins may come late."""
        return [s for s in heard if s.member == "EventNew" and s.args[1] != "phosd"]

    async def listen() -> None:
        connection = await Connection.open(service.address)
        await connection.subscribe(heard.append, "sender='org.phos',member='EventNew'")
        await asyncio.to_thread(service.start, "Checkpoint", "ua{sv}", os.getpid(), 0)
        await asyncio.to_thread(wait_until, lambda: len(news()) == 2, "two events")
        connection.close()

    asyncio.run(listen())
    assert [(s.path, s.args) for s in news()] == [
        (ROOT, ("info", "job")),
        (ROOT, ("warning", "wrong-guess")),
    ]
    found = listed(service, "ListEvents")
    assert [row["kind"] for row in found] == ["wrong-guess", "job", "phosd"]
    assert "secret_kernel" in found[0]["text"]
    assert [row.get("owner") for row in found] == [0, 0, None]
    assert [row["id"] for row in found] == sorted((row["id"] for row in found), reverse=True)
    assert listed(service, "ListEvents", uid=STRANGER) == []
    service.call("DeleteImage", "sa{sv}", "theirs", 0, uid=STRANGER)
    seen = listed(service, "ListEvents", uid=STRANGER)
    assert {(row["kind"], row["subject"]) for row in seen} >= {("image-deleted", "theirs")}
    assert {row["owner"] for row in seen} == {STRANGER}
    since = ("since", "t", found[0]["time"] + 1)
    assert {row["subject"] for row in listed(service, "ListEvents", *since)} >= {"theirs"}
    assert "secret_kernel" not in str(listed(service, "ListEvents", *since))
    with pytest.raises(RuntimeError, match="severity is one of: error, info, warning"):
        listed(service, "ListEvents", "severity", "s", "odd")


def test_an_image_that_cannot_be_read_is_for_administrators(service: Service) -> None:
    service.engine.go.set()
    service.engine.unreadable = {"broken": Busy("image broken cannot be read", hint="look at it")}
    service.start("Checkpoint", "ua{sv}", os.getpid(), 0)
    wait_until(
        lambda: (
            [r["subject"] for r in listed(service, "ListEvents", "severity", "s", "error")]
            == ["broken"]
        ),
        "the event",
    )
    assert listed(service, "ListEvents", uid=STRANGER) == []


def test_what_phosd_cannot_look_for_is_an_event_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []

    def fail() -> list[GpuProcess]:
        looks.append(1)
        raise Unsupported("the driver does not answer", hint="see dmesg")

    monkeypatch.setattr(service.engine, "processes", fail)
    wait_until(lambda: len(looks) > 3, "looks")
    found = [row for row in listed(service, "ListEvents") if row["kind"] == "looking"]
    assert [(row["subject"], row["severity"], row["text"]) for row in found] == [
        ("processes", "warning", "the driver does not answer; see dmesg")
    ]


def test_a_schedule_that_ends_by_an_error_is_a_warning(service: Service) -> None:
    def fail(_: Progress) -> None:
        raise Unsupported("it uses managed memory", hint="none")

    service.engine.act = fail
    service.start("Checkpoint", "ua{sv}", os.getpid(), 1, "every", "d", 60)
    warnings = ("severity", "s", "warning")
    wait_until(lambda: len(listed(service, "ListEvents", *warnings)) == 2, "both warnings")
    ended, job = listed(service, "ListEvents", *warnings)
    assert (job["kind"], ended["kind"], ended["subject"]) == ("job", "schedule", str(os.getpid()))
    assert ended["text"] == "ended: it uses managed memory; none"
    assert ended["owner"] == os.getuid()
