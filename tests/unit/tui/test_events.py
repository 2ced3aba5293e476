"""The log, over a node that the test leads."""

import asyncio
from dataclasses import replace
from typing import Any

from phosd.client.errors import CommandError
from phosd.tui.node import Contact, Node, Update
from phosd.tui.screens import events as screen
from phosd.tui.screens.reading import Reading
from tests.support.tui.fakes import FEATURES, NOW, FakeLink, fake_node
from tests.support.tui.opened import LARGE, opened, run, until, until_shown
from tests.support.tui.snapshots import settled, text


def row(number: int, severity: str = "info", **changes: Any) -> dict[str, Any]:
    """A row of ``ListEvents``: one a second."""
    return {
        "id": number,
        "time": int((NOW - 100 + number) * 1e6),
        "severity": severity,
        "kind": "job",
        "subject": f"job {number}",
        "text": f"text of {number}",
    } | changes


def noted(*rows: dict[str, Any]) -> tuple[Node, FakeLink]:
    node, link = fake_node(features=(*FEATURES, "events"))
    link.answers["ListEvents"] = sorted(rows, key=lambda each: -each["id"])
    return node, link


def asked(link: FakeLink) -> list[dict[str, Any]]:
    calls = [call for call in link.asked if call[0] == "ListEvents"]
    return [{name: variant.value for name, variant in call[1].items()} for call in calls]


def test_what_was_noted_newest_first_with_all_of_its_text() -> None:
    long = "word " * 40 + "end"
    node, _ = noted(row(1, text=long), row(2, "warning"), row(3, "error", kind="looking"))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("6")
            await until_shown(pilot, "✗ ERROR", "! warning", "· info", "2027-01-15 07:58:23")
            lines = text(pilot).splitlines()
            order = [n for line in lines for n in (1, 2, 3) if f"job {n} " in line]
            assert order == [3, 2, 1]
            assert "word end" not in text(pilot)
            await pilot.press("end")
            await until_shown(pilot, "word end")

    run(body)


def test_only_what_matters_more() -> None:
    node, _ = noted(row(1), row(2, "warning"), row(3, "error"), row(4, "panic"))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("6")
            await until_shown(pilot, "job 1 ", "job 2 ", "job 3 ", "job 4 ")
            await pilot.press("i")
            await until_shown(pilot, "only warning and worse", "job 2 ", "job 3 ", "job 4 ")
            assert "job 1 " not in text(pilot)
            await pilot.press("i")
            await until_shown(pilot, "only error and worse", "job 3 ", "job 4 ")
            assert "job 2 " not in text(pilot)
            await pilot.press("i")
            await until_shown(pilot, "job 1 ")

    run(body)


def test_what_is_new_is_asked_for_and_nothing_twice() -> None:
    node, link = noted(row(1), row(2))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("6")
            await until_shown(pilot, "job 2 ")
            link.answers["ListEvents"] = [row(3), row(2)]
            node.apply(Update(noted=True))
            await until_shown(pilot, "job 3 ", "job 2 ", "job 1 ")
            assert asked(link)[0] == {"limit": 1000, "since": 0}
            assert {"limit": 1000, "since": row(2)["time"]} in asked(link)
            assert text(pilot).count("job 2 ") == 1

    run(body)


def test_many_news_are_asked_for_once_a_second() -> None:
    node, link = noted(row(1))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("6")
            await until_shown(pilot, "job 1 ")
            loop = asyncio.get_running_loop()
            begun = loop.time()
            for _ in range(50):
                node.apply(Update(noted=True))
                await pilot.pause()
            assert len(asked(link)) <= 2 + (loop.time() - begun)
            await until(pilot, lambda: len(asked(link)) > 1, "the question after the news")

    run(body)


def test_no_more_are_kept_than_so_many() -> None:
    node, link = noted(*(row(n) for n in range(1, 1001)))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("6")
            for first in (1001, 2001, 3001):
                await until_shown(pilot, f"job {first - 1} ")
                link.answers["ListEvents"] = [row(n) for n in range(first + 999, first - 1, -1)]
                await pilot.press("a")
            await until_shown(pilot, "job 4000 ", f" {screen._MOST}")
            await pilot.press("end")
            await until_shown(pilot, "job 2001 ")

    run(body)


def test_a_log_that_cannot_be_read_says_so_and_is_asked_for_again() -> None:
    node, link = noted()
    link.answers["ListEvents"] = CommandError("Timeout", "it took too long; try again")

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("6")
            await until_shown(pilot, "Timeout: it took too long; try again")
            link.answers["ListEvents"] = [row(1)]
            await pilot.press("a")
            await until_shown(pilot, "job 1 ")
            assert "Timeout" not in await settled(pilot)

    run(body)


def test_a_service_that_tells_no_events() -> None:
    node, link = fake_node()

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("6")
            await until_shown(pilot, "this phosd does not tell what it notes", "a (Read again)")
            await pilot.press("a")
            await until_shown(pilot, "does not offer it")
            assert asked(link) == []
            newer = replace(node.manager, features=frozenset({"events"}))
            link.answers["ListEvents"] = [row(1)]
            node.apply(Update({newer.path: newer}))
            await until_shown(pilot, "job 1 ")

    run(body)


def test_what_was_known_stays_when_phosd_goes() -> None:
    node, link = noted(row(1))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("6")
            await until_shown(pilot, "job 1 ")
            node.apply(Update(contact=Contact.GONE, trouble="phosd does not run; start it"))
            await until_shown(pilot, "start it", "job 1 ", "a (Read again)")
            link.answers["ListEvents"] = [row(2), row(1)]
            whole = Update({node.manager.path: node.manager}, whole=True, contact=Contact.HERE)
            node.apply(whole)
            await until_shown(pilot, "job 2 ", "job 1 ")

    run(body)


def test_an_answer_comes_when_the_screen_closes() -> None:
    node, _ = noted(row(1))
    came = 0

    async def body() -> None:
        async with opened(node) as pilot:
            closing: Any = pilot.app.screen

            async def answered() -> None:
                nonlocal came
                came += 1
                closing.query_one("#gone-already")

            reading = Reading(closing, answered)
            for time in (1, 2):
                reading.want()
                await until(pilot, lambda: came == time, "an answer")  # noqa: B023
            await pilot.pause()
            assert pilot.app.is_running

    run(body)


def test_names_that_would_do_something_to_the_terminal_and_any_size() -> None:
    hostile = {"kind": "[b]k\x1b", "subject": "\u202es", "text": "[red]\x1b[2J" + "模型" * 60}
    node, _ = noted(row(1, "\x07sev", **hostile))

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("6")
            await until_shown(pilot, "[b]k", "[red]")
            for size in ((60, 20), (30, 8), (200, 60), (80, 24)):
                await pilot.resize_terminal(*size)
                shown = await settled(pilot)
                assert not {"\x1b", "\x07", "\u202e"} & set(shown)
                strips = pilot.app.screen._compositor.render_strips()
                assert {strip.cell_length for strip in strips} == {size[0]}

    run(body)
