"""What stops or ends a program asks first; what clears a GPU shows its plan."""

from functools import partial

import pytest
from textual.pilot import Pilot

from phosd.bus import Variant
from phosd.client.errors import CommandError
from phosd.tui.node import Update
from phosd.tui.widgets.dialogs import Question
from phosd.tui.widgets.job import job_page
from tests.support.tui.fakes import FEATURES, fake_node, gpu, job, process
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told
from tests.support.tui.snapshots import text

ALL = (*FEATURES, "migrate", "suspend", "resume", "swap", "then", "evacuate", "process-kernels")


async def answer(pilot: Pilot[None], key: str) -> None:
    await until(pilot, lambda: isinstance(pilot.app.screen, Question), "the question")
    await pilot.press(key)


@pytest.mark.parametrize("key", ["s", "E"])
def test_nothing_stops_without_an_answer(key: str) -> None:
    node, link = fake_node(process(1), features=ALL)

    async def body() -> None:
        async with opened(node) as pilot:
            for no in ("n", "escape", "enter"):
                await pilot.press(key)
                await answer(pilot, no)
            assert len(pilot.app.screen_stack) == 1 and link.asked == []

    run(body)


def test_a_program_is_saved_and_ended() -> None:
    node, link = fake_node(process(1), process(2), features=ALL)

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("space", "space", "E")
            await until_shown(pilot, "Save and end 2 processes: 1, 2?")
            await answer(pilot, "y")
            wanted = [("Checkpoint", pid, {"then": Variant("s", "end")}) for pid in (1, 2)]
            await until(pilot, lambda: link.asked == wanted, "the calls")

    run(body)


def test_two_take_turns() -> None:
    asleep = process(2, state="suspended", gpus=())
    node, link = fake_node(process(1), asleep, process(3), features=ALL)

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("S")
            await until_told(pilot, "Swap: not now", "mark two processes")
            await pilot.press("space", "down", "space", "S")  # two that run
            await until_told(pilot, "Swap: not now", "a suspended one")
            await pilot.press("u", "home", "space", "space", "S")
            await until_shown(pilot, "Suspend 1 (", "resume 2")
            await answer(pilot, "y")
            await until(pilot, lambda: link.asked == [("Swap", 1, 2)], "the call")

    run(body)


STEPS = [
    (1, "migrate", 40 << 30, "0:1", "", "python train.py"),
    (2, "suspend", 9 << 30, "", "no other GPU has room", "python serve.py"),
    (3, "stay", 0, "", "it was not started with `phos run`", "./bare"),
]


def test_a_gpu_is_cleared_step_by_step() -> None:
    node, link = fake_node(gpu(0), gpu(1), process(1), process(2), process(3), features=ALL)
    link.answers["PlanEvacuation"] = STEPS
    link.answers["Migrate"] = link.answers["Suspend"] = job(1).path

    def ended(state: str, operation: str) -> Update:
        done = job(1, operation=operation, state=state, message="the disk is full")
        return Update({done.path: done})

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("5", "e")
            await until_shown(pilot, "Clear GPU 0", "to GPU 1", "suspend", "stays", "not started")
            await answer(pilot, "n")
            assert link.asked == [("PlanEvacuation", "GPU-0")]
            node.apply(ended("running", "migrate"))
            await pilot.press("e")
            await answer(pilot, "y")
            await until(pilot, lambda: link.asked[2:] == [("Migrate", 1, "0:1")], "the first step")
            await pilot.pause(0.5)
            assert len(link.asked) == 3, "the next one waits"
            node.apply(ended("failed", "suspend"))
            await until(pilot, lambda: link.asked[3:] == [("Suspend", 2)], "the second step")
            told = partial(until_told, pilot, "Evacuate GPU 0")
            await told("0 of 2 processes are gone from it", "1 stays: the disk is full", "2 stays")

    run(body)


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ([], "nothing that you may move is there"),
        (STEPS[2:], "all stay: it was not started"),
        (CommandError("NotAuthorized", "ask an administrator"), "ask an administrator"),
    ],
)
def test_a_gpu_from_which_nobody_goes(plan: object, told: str) -> None:
    node, link = fake_node(gpu(0), process(1), features=ALL)
    link.answers["PlanEvacuation"] = plan

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("5", "e")
            await until_told(pilot, "Evacuate GPU 0", told)

    run(body)


def test_a_suspect_kernel_is_trusted() -> None:
    node, link = fake_node(process(1), features=ALL)
    link.answers["ListKernels"] = [("scatter", "ab", 7, True), ("gemm", "ab", 9, False)]
    link.answers["TrustKernels"] = 1

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("enter", "t")
            await until_told(pilot, "Trust: not now", "on the tab Kernels")
            await pilot.press("left")
            await until_shown(pilot, "! suspect", "scatter")
            await pilot.press("t")
            await until_told(pilot, "Trust scatter", "cleared: 1")
            assert ("TrustKernels", {"kernel": Variant("s", "scatter")}) in link.asked
            await pilot.press("down", "t")
            await until_told(pilot, "Trust: not now", "gemm is no suspect")

    run(body)


def test_escape_shows_all_rows_and_then_goes_back() -> None:
    node, _ = fake_node(process(1), process(2), features=ALL)

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("enter")
            assert len(pilot.app.screen_stack) == 2
            await pilot.press("slash", "x", "enter", "escape")
            assert len(pilot.app.screen_stack) == 2, "it showed all rows"
            await pilot.press("escape")
            assert len(pilot.app.screen_stack) == 1
            await pilot.press("space", "escape")
            assert "marked" not in text(pilot)
            await pilot.press("escape", "escape")
            assert pilot.app.is_running and len(pilot.app.screen_stack) == 1

    run(body)


def test_figures_have_their_units() -> None:
    done = job(1, details=(("drain_bytes", 2097152.0), ("waited_seconds", 0.25), ("passes", 3.0)))
    page = job_page(done, 0.0, 80).plain
    assert "drain bytes 2.0 MiB" in page and "waited seconds 0.25 s" in page and "passes 3" in page


def test_a_filter_that_hides_the_row_under_the_cursor_explains_the_other() -> None:
    node, _ = fake_node(
        process(1, hook="driver", reason="it has no hook"),
        process(2, command=("python", "mine.py")),
        features=ALL,
    )

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await until_shown(pilot, "it has no hook", "s (Suspend)")
            await pilot.press("slash", *"mine", "enter")
            await until_shown(pilot, "1 of 2 rows", "s Suspend")
            assert "it has no hook" not in text(pilot)

    run(body)


@pytest.mark.parametrize(("width", "shown"), [(160, "● node7 phosd 0.1.0"), (80, "● node7")])
def test_the_top_line_tells_which_machine_it_is(width: int, shown: str) -> None:
    node, _ = fake_node(process(1), features=ALL)

    async def body() -> None:
        node.name = "node7"
        async with opened(node, (width, 24)) as pilot:
            await until_shown(pilot, shown)

    run(body)
