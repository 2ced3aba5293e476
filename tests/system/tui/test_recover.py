"""The key that resumes a process which was left standing still."""

import os
from dataclasses import replace

import pytest

from phosd.errors import Internal
from phosd.tui.link import BusLink
from phosd.tui.node import Node, Update
from phosd.tui.widgets.dialogs import Question
from tests.support.fake_engine import this_process
from tests.support.service import Service
from tests.support.tui.fakes import FEATURES, fake_node, job, process
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told
from tests.support.tui.snapshots import compare_all, settled

RECOVERS = (*FEATURES, "recover")


@pytest.mark.parametrize("state", ["locked", "checkpointed", "closed", "parked"])
def test_it_asks_for_the_process_by_name_and_the_answer_is_no_unless_one_says_yes(
    state: str,
) -> None:
    node, link = fake_node(process(1), process(2, state=state), features=RECOVERS)
    link.answers["Recover"] = "process 2 was locked, and runs again"

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("down")
            await until_shown(pilot, "no job works on it: press b")
            for no in ("enter", "escape", "n"):
                await pilot.press("b")
                await until_shown(pilot, "Recover 2 (python train.py --epochs 3)?", state)
                await pilot.press(no)
                await until(pilot, lambda: len(pilot.app.screen_stack) == 1, "the dialog to go")
            assert link.asked == []
            await pilot.press("b")
            await until_shown(pilot, "Recover 2")
            await pilot.press("y")
            await until(pilot, lambda: link.asked == [("Recover", 2)], "the call")
            await until_told(pilot, "Recover 2", "was locked, and runs again")

    run(body)


def test_only_of_all_marked_that_stand_still() -> None:
    standing = (process(2, state="locked"), process(3, state="parked"))
    node, link = fake_node(process(1), *standing, features=RECOVERS)

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("space", "space", "space", "b")
            await until_shown(pilot, "Recover 2 processes: 2, 3", "locked, parked")
            runs = process(3)
            node.apply(Update({runs.path: runs}))
            await pilot.press("y")
            await until(pilot, lambda: link.asked == [("Recover", 2)], "the call")

    run(body)


@pytest.mark.parametrize("why", ["runs", "suspended", "under a job", "not offered", "readonly"])
def test_where_it_makes_no_sense_it_says_why_and_asks_nothing(why: str) -> None:
    state = {"runs": "running", "suspended": "suspended"}.get(why, "locked")
    jobs = [job(1, target="1", stopped=True)] if why == "under a job" else []
    features = FEATURES if why == "not offered" else RECOVERS
    node, link = fake_node(process(1, state=state), *jobs, features=features)

    async def body() -> None:
        async with opened(node, readonly=why == "readonly") as pilot:
            await pilot.press("b")
            await until_told(pilot, "Recover: not now")
            assert not isinstance(pilot.app.screen, Question) and link.asked == []

    run(body)


def test_a_process_that_ends_or_runs_while_its_dialog_is_open() -> None:
    standing = process(1, state="locked")
    node, link = fake_node(standing, features=RECOVERS)

    async def body() -> None:
        async with opened(node) as pilot:
            for update in (
                Update({standing.path: replace(standing, state="running")}),
                Update({standing.path: standing}),
                Update(gone=frozenset({standing.path})),
            ):
                if not isinstance(pilot.app.screen, Question):
                    await pilot.press("b")
                    await until_shown(pilot, "Recover 1")
                node.apply(update)
                stands = standing in update.records.values()
                await until(
                    pilot,
                    lambda: pilot.app.screen.query_one("#yes").disabled != stands,  # noqa: B023
                    "the button to tell",
                )
            await until_shown(pilot, "Nothing stands still any more.")
            await pilot.press("y", "n")
            await until(pilot, lambda: len(pilot.app.screen_stack) == 1, "the dialog to go")
            assert link.asked == []

    run(body)


def test_what_the_question_looks_like() -> None:
    hostile = process(4711, state="checkpointed", command=("[bold]x[/]", "\x1b[2J", "模型" * 9))
    node, _ = fake_node(hostile, features=RECOVERS)

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("b")
            await compare_all(pilot, "question-recover")
            assert "\x1b" not in await settled(pilot)

    run(body)


def test_the_service_does_it_or_says_what_next(service: Service) -> None:
    service.engine.running = [this_process(state="locked")]
    service.engine.trouble = Internal("nobody holds its memory", hint="end the process")

    async def body() -> None:
        async with opened(Node(BusLink(service.address)), LARGE) as pilot:
            await until_shown(pilot, "locked", "no job works on it: press b")
            await pilot.press("b")
            await until_shown(pilot, f"Recover {os.getpid()} (python train.py)")
            await pilot.press("y")
            await until_told(pilot, f"Recover {os.getpid()}: Internal", "end the process")
            service.engine.trouble = None
            await until_shown(pilot, "no job works on it: press b")
            await pilot.press("b")
            await until_shown(pilot, "Another tool")
            await pilot.press("y")
            await until_told(pilot, f"Recover {os.getpid()}", "was given back its parked memory")
            assert service.engine.recovered == [os.getpid()] * 2

    run(body)
