"""The one table of actions: keys, help and palette come from it, and so does why one is dimmed."""

import itertools

import pytest
from textual.app import App
from textual.binding import Binding
from textual.command import CommandPalette
from textual.pilot import Pilot
from textual.widget import Widget
from textual.widgets import Input

from phosd.tui.actions import ACTIONS, ANYWHERE, MOVE, TABLE, Action, of, why_not
from phosd.tui.app import SCREENS, PhosApp
from phosd.tui.node import Contact, Update
from phosd.tui.screens.base import NodeScreen
from phosd.tui.screens.page import PageScreen
from phosd.tui.widgets.table import RecordTable
from tests.support.tui.fakes import fake_node, gpu, job, process
from tests.support.tui.opened import opened, run, until, until_shown, until_told
from tests.support.tui.snapshots import text


def screens() -> list[type[NodeScreen]]:
    """All screens, also those that are one page."""
    return [
        kind
        for kind in (*NodeScreen.__subclasses__(), *PageScreen.__subclasses__())
        if kind is not PageScreen
    ]


def place_of(scope: str) -> type[App[None]] | type[Widget]:
    """Whose methods the actions of a scope are."""
    fixed: dict[str, type[App[None]] | type[Widget]] = {
        ANYWHERE: PhosApp,
        TABLE: RecordTable,
        MOVE: RecordTable,
    }
    found = {screen.SCOPE: screen for screen in screens()}
    return {**found, **fixed}[scope]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: f"{action.scope}-{action.id}")
def test_every_action_has_its_method_and_its_key(action: Action) -> None:
    place = place_of(action.scope)
    name = action.id.partition("(")[0]
    assert callable(getattr(place, f"action_{name}", None)), f"{place.__name__}.action_{name}"
    keys = {(b.key, b.action) for b in Binding.make_bindings(place.BINDINGS)}
    assert {(key, action.id) for key in action.key.split(",")} <= keys


@pytest.mark.parametrize("screen", [s.SCOPE for s in screens()])
def test_no_key_means_two_things(screen: str) -> None:
    numbers = [str(number) for number in range(1, len(SCREENS) + 1)]
    keys = [a.key.split(",") for a in of(screen, TABLE, MOVE, ANYWHERE)]
    flat = [*itertools.chain(*keys), *numbers]
    assert sorted(flat) == sorted(set(flat))


def test_each_key_means_one_thing_wherever_it_acts() -> None:
    """``enter`` opens what is under the cursor."""
    meanings = {
        (key, action.name) for action in ACTIONS for key in action.key.split(",") if key != "enter"
    }
    left_and_right = {"left", "h", "right", "l"}  # the next of what the screen has
    keys = [key for key, _ in meanings if key not in left_and_right]
    assert sorted(keys) == sorted(set(keys))


def test_what_the_service_does_not_offer_is_dimmed_with_the_reason() -> None:
    node, link = fake_node(process(1))

    async def body() -> None:
        async with opened(node) as pilot:
            assert "m (Migrate)" in text(pilot) and "c Checkpoint" in text(pilot)
            await pilot.press("m", "s")
            await until_told(pilot, "Suspend: not now", "phosd 0.1.0 does not offer it")
            assert link.asked == []

    run(body)


def test_a_newer_service_has_them() -> None:
    node, link = fake_node(gpu(), gpu(1), process(1), process(2, state="suspended"), process(3),
                           features=("migrate", "suspend"))  # fmt: skip

    async def body() -> None:
        async with opened(node) as pilot:
            assert "m Migrate" in text(pilot) and "c (Checkpoint)" in text(pilot)
            await pilot.press("s")
            await until_shown(pilot, "Suspend 1 (")
            await pilot.press("y", "down")
            await until_shown(pilot, "s Resume")
            await pilot.press("s", "down", "m")
            await until_shown(pilot, "Migration of 3")
            await pilot.press("enter")
            wanted = [("Suspend", 1), ("Resume", 2), ("Migrate", 3, "GPU-1")]
            await until(pilot, lambda: link.asked == wanted, "the calls")

    run(body)


def test_readonly_dims_everything_that_acts() -> None:
    node, link = fake_node(process(1), job(1), features=("checkpoint", "migrate", "suspend"))

    async def body() -> None:
        async with opened(node, readonly=True) as pilot:
            assert "readonly" in text(pilot)
            acting = [a for a in ACTIONS if a.acts]
            assert acting and all(why_not(a, node, readonly=True) for a in acting)
            assert not any(why_not(a, node, readonly=False) for a in acting if not a.feature)
            for action in ("checkpoint", "suspend"):  # whoever asks for it, and how
                await pilot.app.run_action(action, pilot.app.screen)
            await pilot.press("c", "C", "m", "s", "2", "x")
            await until_told(pilot, "not now", "started with --readonly")
            await pilot.app.run_action("cancel", pilot.app.screen)
            await pilot.pause()
            assert link.asked == []
            assert len(pilot.app.screen_stack) == 1

    run(body)


def test_without_phosd_nothing_acts_and_it_says_so() -> None:
    node, link = fake_node(process(1))
    node.apply(Update(contact=Contact.GONE, trouble="phosd does not run on this bus; start it"))

    async def body() -> None:
        async with opened(node) as pilot:
            assert "No phosd" in text(pilot) and "start it" in text(pilot)
            await pilot.press("c")
            await until_told(pilot, "phosd does not answer")
            assert link.asked == []

    run(body)


def test_the_help_tells_every_key_of_the_screen() -> None:
    node, _ = fake_node(process(1))

    async def body() -> None:
        async with opened(node, (120, 60)) as pilot:
            await pilot.press("question_mark")
            await until_shown(pilot, "Processes: keys")
            for action in of("processes", TABLE, MOVE, ANYWHERE):
                assert f" {action.name} " in text(pilot), action.id
            assert "not now: phosd 0.1.0 does not offer it" in text(pilot)
            await pilot.press("q")
            await until(pilot, lambda: "keys" not in text(pilot), "the help to go")

    run(body)


def test_the_palette_finds_actions_and_screens_and_runs_them() -> None:
    node, link = fake_node(process(1), job(1))

    async def palette(pilot: Pilot[None], words: str) -> None:
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(pilot.app.screen, CommandPalette), "the palette")
        pilot.app.screen.query_one(Input).value = words
        await until_shown(pilot, words)

    async def body() -> None:
        async with opened(node) as pilot:
            await palette(pilot, "Checkpoint (processes)")
            await until_shown(pilot, "save the process; it goes on")
            await pilot.press("enter")
            await until(pilot, lambda: link.asked == [("Checkpoint", 1)], "the checkpoint")
            await palette(pilot, "Migrate (processes)")
            await until_shown(pilot, "not now: phosd 0.1.0")
            await pilot.press("enter")
            await until_told(pilot, "Migrate: not now")
            await palette(pilot, "Screen: Jobs")
            await until_shown(pilot, "go there")
            await pilot.press("enter")
            await until(pilot, lambda: pilot.app.current_mode == "jobs", "the screen")

    run(body)


def test_keys_can_be_clicked() -> None:
    node, link = fake_node(process(1))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.click("KeyLine", offset=(3, 0))
            await until(pilot, lambda: link.asked == [("Checkpoint", 1)], "the checkpoint")
            await pilot.click("TopLine", offset=(15, 0))
            await until(pilot, lambda: pilot.app.current_mode == "jobs", "the screen")

    run(body)


def test_number_keys_go_from_screen_to_screen_and_q_goes_out() -> None:
    node, link = fake_node(process(1))

    async def body() -> None:
        async with opened(node) as pilot:
            for number, screen in enumerate(SCREENS, 1):
                await pilot.press(str(number))
                assert pilot.app.current_mode == screen.SCOPE
            await pilot.press("1", "enter")
            await until_shown(pilot, "Kernels")
            await pilot.press("q")
            await until(pilot, lambda: len(pilot.app.screen_stack) == 1, "the way back")
            assert link.running
            await pilot.press("q")
            await until(pilot, lambda: pilot.app.return_code == 0, "the end")

    run(body)
