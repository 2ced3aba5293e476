"""The pools, over a node that the test leads."""

from dataclasses import replace

from textual.widgets import Button, Input

from phosd.tui.node import Update
from phosd.tui.widgets.dialogs import Form, Question
from tests.support.tui.fakes import FEATURES, fake_node, image, pool
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told
from tests.support.tui.snapshots import compare_all, text

POOLS = (*FEATURES, "pools")
SAID = "GPU 0 has 2.0 GiB free, the program needs 3.4 GiB"


def test_what_there_is_and_what_is_wrong() -> None:
    saved = image(name="bert", number=3)
    other = pool("asr", image="20270101T000000-aaaa", waiting=1, waiting_ready=0, trouble=SAID)
    node, _ = fake_node(saved, pool(), other, features=POOLS)

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("7")
            await until_shown(pilot, "chat", "bert@3", "3 of 3", "1 of 1", "0 of 1", SAID)
            assert text(pilot).index("asr") < text(pilot).index("chat"), "trouble comes first"
            node.apply(Update({other.path: replace(other, waiting=2, trouble="")}))
            await until_shown(pilot, "2 of 3")
            node.apply(Update({other.path: replace(other, waiting=2, running=6, trouble="")}))
            await until_shown(pilot, "it has 8, as many as it may")
            node.apply(Update(gone=frozenset({other.path, pool().path})))
            await until_shown(pilot, "no pools yet; `M` on an image makes one")

    run(body)


def test_one_is_started_changed_and_ended() -> None:
    node, link = fake_node(pool(), features=POOLS)
    link.answers |= {"ScalePool": None, "RemovePool": None}

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("7", "B")
            await until(pilot, lambda: link.asked == [("StartPooled", "chat")], "the start")
            await pilot.press("Z")
            await until(pilot, lambda: isinstance(pilot.app.screen, Form), "the form")
            pilot.app.screen.query_one("#ready", Input).value = "65"
            pilot.app.screen.query_one("#go", Button).press()
            await until_shown(pilot, "'65' is no number of programs (up to 64)")
            pilot.app.screen.query_one("#ready", Input).value = "2"
            pilot.app.screen.query_one("#go", Button).press()
            await until_told(pilot, "it has its new size")
            member, name, options = link.asked[1]
            assert (member, name) == ("ScalePool", "chat")
            assert {key: value.value for key, value in options.items()} == {
                "hollow": 2,
                "ready": 2,
                "max": 8,
            }
            await pilot.press("d")
            await until(pilot, lambda: isinstance(pilot.app.screen, Question), "the question")
            await until_shown(pilot, "Those that were started run")
            await pilot.press("y")
            await until_told(pilot, "it is no pool any more")
            assert link.asked[2:] == [("RemovePool", "chat")]

    run(body)


def test_a_pool_that_ends_meanwhile_is_not_ended_again() -> None:
    node, link = fake_node(pool(), features=POOLS)

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("7", "d")
            await until(pilot, lambda: isinstance(pilot.app.screen, Question), "the question")
            node.apply(Update(gone=frozenset({pool().path})))
            await until_shown(pilot, "It is not there any more.")
            await pilot.press("y", "escape")
            assert not link.asked

    run(body)


def test_an_image_becomes_one() -> None:
    saved = image(name="bert", number=3)
    node, link = fake_node(saved, features=POOLS)
    link.answers["CreatePool"] = None

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("3", "M")
            await until(pilot, lambda: isinstance(pilot.app.screen, Form), "the form")
            assert pilot.app.screen.query_one("#name", Input).value == "bert"
            pilot.app.screen.query_one("#go", Button).press()
            await until_told(pilot, "it is being filled; Pools (7) shows it")
            assert link.asked[0][:3] == ("CreatePool", "bert", saved.id)

    run(body)


def test_screen() -> None:
    saved = image(name="bert", number=3)
    other = pool("asr", image="20270101T000000-aaaa", waiting=1, waiting_ready=0, trouble=SAID)
    node, _ = fake_node(saved, pool(), other, features=POOLS)

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("7")
            await compare_all(pilot, "pools")

    run(body)
