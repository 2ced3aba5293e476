"""Keys that are typed faster than screens come, and what they do."""

import asyncio
from dataclasses import replace

import pytest
from textual.app import App
from textual.events import Key

from phosd.client.records import Image, Process
from phosd.tui.node import Update
from phosd.tui.screens.images import ImagesScreen
from phosd.tui.screens.jobs import JobScreen
from phosd.tui.widgets import table as table_module
from phosd.tui.widgets.dialogs import Form, Question
from phosd.tui.widgets.table import RecordTable
from tests.support.harness import PATIENCE
from tests.support.tui.fakes import fake_node, gpu, image, job, process
from tests.support.tui.opened import opened, run, through, until, until_shown, until_told


def type_at_once(app: App[None], *keys: str) -> None:
    """As a terminal hands them over that got them in one piece."""
    for key in keys:
        app.post_message(Key(key, {"space": " "}.get(key, key if len(key) == 1 else None)))


@pytest.mark.parametrize("screen", ["2", "3", "4", "1"])
def test_keys_typed_at_once_open_a_page_and_come_back(screen: str) -> None:
    """They once were queued by widget; and ``q`` went further than the page that had not come."""
    node, link = fake_node(gpu(), process(4711), job(1), image())
    row = {"id": 1, "operation": "checkpoint", "target": "4711", "state": "done", "started": 1.0}
    link.answers["ListHistory"] = [row]

    async def body() -> None:
        async with opened(node) as pilot:
            type_at_once(pilot.app, screen, "enter", "q")
            await through(pilot)
            assert pilot.app.return_code is None
            assert len(pilot.app.screen_stack) == 1
            table = pilot.app.screen.query_one(RecordTable)
            await until(pilot, lambda: table.current, "a row")
            await pilot.press("enter")
            await until(pilot, lambda: len(pilot.app.screen_stack) == 2, "the page")
            type_at_once(pilot.app, "q", "q", "q")
            await until_told(pilot, "Back: not done", "has just changed")
            assert pilot.app.return_code is None
            await pilot.press("q")
            await until(pilot, lambda: pilot.app.return_code == 0, "the end")

    run(body)


def test_a_key_is_for_the_screen_that_the_one_before_opened() -> None:
    node, _ = fake_node(gpu(), process(4711), job(1, target="1"), job(2, target="2"), image())

    async def body() -> None:
        async with opened(node) as pilot:
            type_at_once(pilot.app, "2", "j", "enter")
            await until(pilot, lambda: isinstance(pilot.app.screen, JobScreen), "the page")
            assert isinstance(pilot.app.screen, JobScreen) and pilot.app.screen.job.number == 1

    run(body)


def test_what_acts_does_so_only_on_what_was_in_sight() -> None:
    node, link = fake_node(gpu(), process(4711), job(1), image())

    async def body() -> None:
        async with opened(node) as pilot:
            type_at_once(pilot.app, "2", "x")
            await until_told(pilot, "Cancel: not done", "look, and press it again")
            assert link.asked == []
            await pilot.press("x")
            await until(pilot, lambda: link.asked == [("Cancel",)], "the call")

    run(body)


@pytest.mark.parametrize(("keys", "dialog"), [("dy", Question), ("Ry", Form)])
def test_a_dialog_takes_no_answer_from_before_it_was_there(
    keys: str, dialog: type[Question | Form]
) -> None:
    node, link = fake_node(image())

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3")
            type_at_once(pilot.app, *keys, "tab", "enter", "enter")
            await until(pilot, lambda: isinstance(pilot.app.screen, dialog), "the dialog")
            await through(pilot)
            assert isinstance(pilot.app.screen, dialog) and link.asked == []
            await pilot.press("escape")
            await until(pilot, lambda: isinstance(pilot.app.screen, ImagesScreen), "its end")

    run(body)


def test_what_goes_under_the_cursor_does_not_pass_its_key_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_module, "_REACTION", 600.0)  # however busy the machine is
    node, link = fake_node(process(1), process(2), process(3))

    async def body() -> None:
        async with opened(node) as pilot:
            table = pilot.app.screen.query_one(RecordTable)
            node.apply(Update(gone=frozenset({process(1).path})))
            await until(pilot, lambda: table.current == process(2), "the next one")
            pilot.app.simulate_key("c")
            await until_told(pilot, "Checkpoint: not done")
            assert link.asked == []
            table.chosen_since -= 600.0  # as if that had passed
            await pilot.press("c")
            await until(pilot, lambda: link.asked == [("Checkpoint", 2)], "the call")

    run(body)


def test_the_last_mark_that_goes_does_not_pass_its_key_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table_module, "_REACTION", 600.0)  # however busy the machine is
    node, link = fake_node(process(1), process(2), process(3))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("space", "down")
            node.apply(Update(gone=frozenset({process(1).path})))
            table = pilot.app.screen.query_one(RecordTable)
            await until(pilot, lambda: table.chosen == [process(3)], "the mark to go")
            pilot.app.simulate_key("c")
            await until_told(pilot, "Checkpoint: not done")
            assert link.asked == []

    run(body)


def test_a_row_that_only_changes_keeps_its_keys() -> None:
    node, link = fake_node(process(1), process(2), image())

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("down")
            for size in range(20):
                changed = replace(process(2), device_bytes=size)
                node.apply(
                    Update({changed.path: changed, process(9 + size).path: process(9 + size)})
                )
                await pilot.pause()
            pilot.app.simulate_key("c")
            await until(pilot, lambda: link.asked == [("Checkpoint", 2)], "the call")
            assert len(node.of(Process)) == 22 and len(node.of(Image)) == 1

    run(body)


def test_words_of_a_filter_are_not_actions() -> None:
    node, link = fake_node(process(1), process(2, command=("xcd", "q")))

    async def body() -> None:
        async with opened(node) as pilot:
            type_at_once(pilot.app, "slash", "x", "c", "d", "space", "q", "enter", "c")
            await until_shown(pilot, "xcd q", "1 of 2")
            await until(pilot, lambda: link.asked == [("Checkpoint", 2)], "the call")

    run(body)


def test_keys_go_on_when_a_screen_never_comes_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a widget does, the keys are not taken away from the user."""
    node, _ = fake_node(process(1), job(1))
    monkeypatch.setattr("phosd.tui.keys._TIMEOUT", 0.1)

    async def body() -> None:
        async with opened(node) as pilot:
            held = asyncio.Event()
            pilot.app.screen.query_one(RecordTable).call_later(held.wait)
            try:
                type_at_once(pilot.app, "down", "2")
                async with asyncio.timeout(PATIENCE):
                    while pilot.app.current_mode != "jobs":
                        await asyncio.sleep(0.02)
            finally:
                held.set()

    run(body)


def test_keys_behind_the_one_that_leaves_are_for_nobody() -> None:
    node, link = fake_node(process(1))

    async def body() -> None:
        async with opened(node) as pilot:
            type_at_once(pilot.app, *"qcqdqcq", "enter", "c")
            await until(pilot, lambda: pilot.app.return_code == 0, "the end")
        assert link.asked == [] and not link.running

    run(body)
