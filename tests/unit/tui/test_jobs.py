"""Jobs and the page of one, over a node that the test leads."""

from typing import Any

from phosd.client.errors import CommandError
from phosd.client.records import Job, Phase
from phosd.tui.node import Update
from phosd.tui.widgets.job import time_line
from tests.support.tui.fakes import NOW, fake_node, job
from tests.support.tui.opened import opened, run, until, until_shown, until_told
from tests.support.tui.snapshots import text

PHASES = (
    Phase("prepare", False, 1.0, 0, 0),
    Phase("control", True, 2.0, 0, 0),
    Phase("drain", False, 5.0, 10 << 30, 10 << 30),
)


def finished(number: int = 1, **changes: Any) -> Job:
    values: dict[str, Any] = {
        "state": "done",
        "phase": "publish",
        "progress": None,
        "phases": PHASES,
        "cancelable": False,
        "ended": NOW,
        "expected_end": None,
        "mode": "recopy",
        "why": "the guess was wrong",
        "wrong_guesses": 1,
        "suspects": ("scatter[x]",),
        "notes": ("a socket will be closed",),
        "details": (("copied_bytes", 3.0),),
        "result": "20270115T080000-5f3a",
    }
    return job(number, **(values | changes))


def test_only_what_runs_is_cancelled() -> None:
    node, link = fake_node(job(1), job(2), finished(3))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("2")
            await until_shown(pilot, "✓ done", "x (Cancel)")
            await pilot.press("x")
            await until_told(pilot, "Cancel: not now", "it has ended")
            assert link.asked == []
            await pilot.press("home", "space", "space", "space", "x")
            await until(pilot, lambda: link.asked == [("Cancel",), ("Cancel",)], "the calls")

    run(body)


def test_a_job_that_ends_while_it_is_cancelled() -> None:
    node, link = fake_node(job(1))
    link.answers["Cancel"] = CommandError("Unsupported", "job 1 has ended already (done)")

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("2", "x")
            await until_told(pilot, "Cancel job 1: Unsupported", "has ended already")

    run(body)


def test_the_page_of_a_job_is_live_and_stays_when_the_job_is_forgotten() -> None:
    node, link = fake_node(job(1, stopped=True, phase="control", progress=None))

    async def body() -> None:
        async with opened(node, (100, 40)) as pilot:
            await pilot.press("2", "enter")
            await until_shown(pilot, "Job 1: checkpoint of 4711", "■ stopped", "◀ now", "x Cancel")
            running = job(1, progress=0.25)
            node.apply(Update({running.path: running}))
            await until_shown(pilot, "▶ running", "25%", "20.0 GiB/s", "1.00 s left")
            await pilot.press("x")
            await until(pilot, lambda: link.asked == [("Cancel",)], "the call")
            over = finished()
            node.apply(Update({running.path: over}))
            await until_shown(
                pilot,
                "✓ done",
                "recopy: the guess was wrong",
                "1 (the program wrote where nobody expected it)",
                "scatter[x]",
                "a socket will be closed",
                "copied bytes 3",
                "the program stood still, 2.00 s",
                "x (Cancel)",
            )
            node.apply(Update(gone=frozenset({running.path})))
            await until_shown(pilot, "phosd has forgotten it", "recopy: the guess was wrong")
            await pilot.press("q")
            await until_shown(pilot, "no jobs yet")

    run(body)


def test_the_time_line_is_as_long_as_the_job() -> None:
    bar, names, legend = time_line(PHASES, 80).plain.splitlines()
    assert len(bar) == len(names) == 80
    assert (bar.count("█"), bar.count("▒") + bar.count("░")) == (20, 60)
    assert names.split() == ["prepare", "control", "drain"]
    assert "2.00 s" in legend and "6.00 s" in legend
    tiny = tuple(Phase("x", False, 0.0, 0, 0) for _ in range(9))
    assert time_line(tiny, 4).plain.splitlines()[0] == "▒░▒░▒░▒░▒"


def test_a_job_that_waits_tells_its_place() -> None:
    node, _ = fake_node(job(1, state="queued", position=3, phase="", progress=None, phases=()))

    async def body() -> None:
        async with opened(node) as pilot:
            await until_shown(pilot, "◌ job 1", "others must end first")
            await pilot.press("2")
            await until_shown(pilot, "◌ queued 3")

    run(body)


def test_a_failed_job_tells_its_error_in_the_list() -> None:
    failed = finished(state="failed", result="", error="OutOfSpace", message="the disk [is] full")
    node, _ = fake_node(failed)

    async def body() -> None:
        async with opened(node, (140, 24)) as pilot:
            await pilot.press("2")
            await until_shown(pilot, "✗ failed", "the disk [is] full")
            assert "[is]" in text(pilot)

    run(body)
