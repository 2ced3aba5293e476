"""The history, its plots, its filters and its export, over a node that the test leads."""

import asyncio
import csv
import json
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Select

from phosd.client.errors import CommandError
from phosd.tui.node import Contact, Node, Update
from phosd.tui.widgets.dialogs import Form
from tests.support.tui.fakes import FEATURES, NOW, FakeLink, fake_node, image, job, process
from tests.support.tui.opened import LARGE, opened, run, until, until_shown
from tests.support.tui.snapshots import settled, text
from tests.unit.tui.test_past import ROW

FILTERED = (*FEATURES, "history-filters")
RESTORE = {"id": 13, "operation": "restore", "target": "20270115T080000-5f3a", "owner": 0,
           "state": "failed", "started": NOW - 30.0, "ended": NOW - 29.0, "error": "Busy",
           "message": "4711 runs; end it first", "result": ""}  # fmt: skip


def past(*rows: dict[str, Any], features: tuple[str, ...] = FILTERED) -> tuple[Node, FakeLink]:
    node, link = fake_node(process(4711), features=features)
    link.answers["ListHistory"] = list(rows or (RESTORE, ROW))
    return node, link


def asked(link: FakeLink) -> list[dict[str, Any]]:
    """The options of each question for the history."""
    calls = [call for call in link.asked if call[0] == "ListHistory"]
    return [{name: variant.value for name, variant in call[1].items()} for call in calls]


async def form(pilot: Pilot[None], key: str) -> Form:
    await pilot.press(key)
    await until(pilot, lambda: isinstance(pilot.app.screen, Form), "the form")
    screen = pilot.app.screen
    assert isinstance(screen, Form)
    return screen


def test_past_jobs_and_how_they_went_over_time() -> None:
    node, _ = past()

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("4")
            await until_shown(
                pilot, "Stop time: 0.84 s", "Plots of all programs", "Drain rate: 18.6 GiB/s"
            )
            await until_shown(pilot, "Image, device: 40.0 GiB", "✗ failed", "4711 runs; end it")
            await until_shown(pilot, "! 1", "2027-01-15 07:59", "all processes, all times")
            assert text(pilot).index("4711 runs; end") < text(pilot).index("! 1")
            await pilot.press("down", "enter")
            await until_shown(pilot, "Job 12: checkpoint of 4711", "it is hooked", "drain")

    run(body)


def test_the_size_of_an_image_that_is_there_is_what_the_image_says() -> None:
    node, _ = past()
    node.apply(Update({image().path: image(device_bytes=7 << 30)}))

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("4")
            await until_shown(pilot, "Image, device: 7.0 GiB")
            node.apply(Update(gone=frozenset({image().path})))
            await until_shown(pilot, "Image, device: 40.0 GiB")

    run(body)


def test_targets_have_names_and_the_plots_are_of_the_program_of_the_row() -> None:
    other = ROW | {"id": 11, "target": "815", "result": "gone", "stop_seconds": 9.5}
    ended = ROW | {"id": 10, "state": "failed", "result": "", "error": "Internal",
                   "message": "criu dump failed (it returned 1): a | b"}  # fmt: skip
    node, _ = past(RESTORE, ROW, other, ended)
    node.apply(Update({image().path: image(name="bert", number=3)}))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("4")
            await until_shown(pilot, "bert@3 (2027", "bert (4711)", "Plots of bert.")
            assert "criu dump failed (i" in text(pilot) and "Internal" not in text(pilot)
            await pilot.press("down", "down")
            await until_shown(pilot, "Stop time: 9.50 s", "Plots of 815.", "▶ 815 ")

    run(body)


def test_only_one_process_and_all_again() -> None:
    node, link = past()

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("4")
            await until_shown(pilot, "checkpoint")
            await pilot.press("p")
            await until_shown(pilot, "Process: not now", "the job is of no process")
            await pilot.press("down", "p")
            await until_shown(pilot, "Shown: pid 4711")
            await until(pilot, lambda: asked(link)[-1] == {"limit": 500, "pid": 4711}, "its jobs")
            await pilot.press("p")
            await until(pilot, lambda: asked(link)[-1] == {"limit": 500}, "all of them")
            await until_shown(pilot, "all processes")

    run(body)


def test_filters_by_process_date_kind_and_outcome() -> None:
    node, link = past()

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("4")
            await until(pilot, lambda: asked(link), "the first question")
            screen = await form(pilot, "f")
            given = {"pid": "4x", "since": "someday", "until": "2027-01-15T08:00"}
            for name, value in given.items():
                screen.query_one(f"#{name}", Input).value = value
            screen.query_one("#operation", Select).value = "checkpoint"
            screen.query_one("#state", Select).value = "done"
            screen.query_one("#until", Input).focus()
            await pilot.press("enter")
            await until_shown(pilot, "'4x' is no pid", "'someday' is")
            screen.query_one("#pid", Input).value = " 4711 "
            screen.query_one("#since", Input).value = "2h"
            await pilot.press("enter")
            wanted = {
                "limit": 500,
                "pid": 4711,
                "since": int((NOW - 7200) * 1e6),
                "until": int(NOW * 1e6),
                "operation": "checkpoint",
                "state": "done",
            }
            await until(pilot, lambda: asked(link)[-1] == wanted, "the filtered question")
            await until_shown(pilot, "pid 4711, since 2h")
            screen = await form(pilot, "f")
            assert screen.query_one("#since", Input).value == "2h"
            assert screen.query_one("#state", Select).value == "done"
            await pilot.press("escape")
            await until(pilot, lambda: len(pilot.app.screen_stack) == 1, "the form to go")
            assert asked(link)[-1] == wanted

    run(body)


def test_a_service_without_filters_dims_them() -> None:
    node, link = past(features=FEATURES)

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("4")
            await until_shown(pilot, "f (Which jobs)", "p (Process)", "checkpoint")
            await pilot.press("f")
            await until_shown(pilot, "does not offer it")
            assert all(options == {"limit": 500} for options in asked(link))

    run(body)


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_an_export_has_all_that_the_filters_let_through(tmp_path: Path, kind: str) -> None:
    node, link = past()
    path = tmp_path / f"past.{kind}"

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("4")
            await until_shown(pilot, "checkpoint")
            await pilot.press("down", "p")
            await until_shown(pilot, "Shown: pid 4711")
            screen = await form(pilot, "w")
            assert screen.query_one("#file", Input).value == "phos-history-20270115T080000.csv"
            screen.query_one("#file", Input).value = str(path)
            screen.query_one("#file", Input).focus()
            await pilot.press("enter")
            await until_shown(pilot, "2 jobs are in")
            assert {"limit": 500, "pid": 4711} in asked(link)

    run(body)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file)) if kind == "csv" else json.load(file)
    assert [str(row["id"]) for row in rows] == ["13", "12"]


def test_an_export_asks_for_page_after_page() -> None:
    node, link = past()
    every = [{"id": number} for number in range(1200, 0, -1)]
    pages = []

    async def call(
        path: str, interface: str, member: str, signature: str = "", *args: Any
    ) -> list[Any]:
        wanted = {name: variant.value for name, variant in args[0].items()}
        pages.append(wanted)
        return [[row for row in every if row["id"] < wanted.get("before", 9999)][: wanted["limit"]]]

    link.call = call  # type: ignore[method-assign]
    assert asyncio.run(node.history(10_000, pid=7)) == every
    assert pages == [
        {"limit": 500, "pid": 7},
        {"limit": 500, "pid": 7, "before": 701},
        {"limit": 500, "pid": 7, "before": 201},
    ]


def test_an_export_that_is_not_possible_says_why(tmp_path: Path) -> None:
    node, link = past()
    there = tmp_path / "there.csv"
    there.write_text("mine")

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("4")
            await until_shown(pilot, "checkpoint")
            screen = await form(pilot, "w")
            field = screen.query_one("#file", Input)
            field.focus()
            for name, why in ((str(there), "is there already"), ("x.txt", "must end with")):
                field.value = name
                await pilot.press("enter")
                await until(pilot, lambda why=why: why in text(pilot).replace("\n", ""), why)  # type: ignore[misc]
            link.slow["ListHistory"] = asyncio.Event()
            field.value = str(tmp_path / "new.csv")
            await pilot.press("enter")
            await until(pilot, lambda: len(pilot.app.screen_stack) == 1, "the form to go")
            (tmp_path / "new.csv").write_text("somebody else's")  # since it was checked
            link.slow["ListHistory"].set()
            await until_shown(pilot, "Export: NotWritten", "cannot be written")

    run(body)
    assert there.read_text() == "mine"
    assert (tmp_path / "new.csv").read_text() == "somebody else's"


def test_what_is_new_is_asked_for_and_not_at_every_tick() -> None:
    node, link = past()

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("4")
            await until_shown(pilot, "! 1", "4711 runs")
            await pilot.pause(1.5)  # what the opening of the screen asks for is over
            first = len(asked(link))
            running = job(1)
            node.apply(Update({running.path: running}))
            await until(pilot, lambda: len(asked(link)) == first + 1, "the question after a begin")
            for n in range(10):
                news = job(1, progress=n / 10)
                node.apply(Update({news.path: news}))
            await pilot.pause(1.5)
            assert len(asked(link)) == first + 1
            ended = job(1, state="done")
            node.apply(Update({ended.path: ended}))
            await until(pilot, lambda: len(asked(link)) == first + 2, "the question after the end")

    run(body)


def test_an_answer_that_fails_is_told_and_what_was_known_stays() -> None:
    node, link = past()

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            link.answers["ListHistory"] = CommandError("Internal", "it cannot be read; see the log")
            await pilot.press("4")
            await until_shown(pilot, "Internal: it cannot be read; see the log")
            link.answers["ListHistory"] = [ROW]
            await pilot.press("1", "4")
            await until_shown(pilot, "20270115T080000-5f3a", "all processes")
            await until(pilot, lambda: "Internal" not in text(pilot), "the trouble to go")
            link.answers["ListHistory"] = CommandError("Internal", "it cannot be read; see the log")
            await pilot.press("1", "4")
            await until_shown(pilot, "Internal: it cannot be read", "checkpoint")

    run(body)


def test_without_phosd_nothing_is_asked_and_what_was_known_stays() -> None:
    node, link = past()

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("4")
            await until_shown(pilot, "checkpoint")
            node.apply(Update(contact=Contact.GONE, trouble="phosd does not run; start it"))
            before = len(asked(link))
            await pilot.press("1", "4")
            await until_shown(pilot, "start it", "checkpoint", "w (Export)")
            await pilot.press("w")
            await until_shown(pilot, "phosd does not answer")
            assert len(asked(link)) == before

    run(body)


def test_nothing_yet_and_nothing_that_the_filter_lets_through() -> None:
    node, link = past()
    link.answers["ListHistory"] = []

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("4")
            await until_shown(pilot, "no jobs", "no checkpoint told it")
            await pilot.press("enter")
            await until_shown(pilot, "Details: not now", "there is no job")

    run(body)


def test_names_that_would_do_something_to_the_terminal_and_any_size() -> None:
    odd = {**ROW, "id": 20, "operation": "[b]op\x1b", "target": "\u202et", "mode": "[i]",
           "state": "\x07", "error": "\x1b]0;", "message": "模型" * 40}  # fmt: skip
    node, _ = past(odd, ROW)

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("4")
            await until_shown(pilot, "[b]op")
            for keys in ([], ["enter"], ["q", "f"], ["escape", "w"], ["escape"]):
                await pilot.press(*keys)
                for size in ((60, 20), (30, 8), (200, 60)):
                    await pilot.resize_terminal(*size)
                    shown = await settled(pilot)
                    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
                    strips = pilot.app.screen._compositor.render_strips()
                    assert {strip.cell_length for strip in strips} == {size[0]}

    run(body)
