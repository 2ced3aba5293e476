"""The application over a node that the test leads."""

import asyncio

from textual.widgets import Button

from phosd.tui.app import PhosApp
from phosd.tui.node import Contact, Update
from phosd.tui.widgets.dialogs import Question
from tests.support.tui.fakes import fake_node, gpu, process
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told


def test_the_key_c_checkpoints_the_process_under_the_cursor() -> None:
    node, link = fake_node(gpu(), process(1), process(2))

    async def body() -> None:
        app = PhosApp(node)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("down", "c")
            await pilot.pause()
            assert link.asked == [("Checkpoint", 2)]

    asyncio.run(body())


def test_of_many_toasts_most_are_counted() -> None:
    """Hundreds are marked, one key, and each is refused."""
    node, _ = fake_node(gpu(), process(1))

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            app = pilot.app
            assert isinstance(app, PhosApp)
            for number in range(100):
                app.tell(f"Checkpoint of {number}", "a job works on it; wait", "error")
            await until(pilot, lambda: len(app._notifications) >= 8, "the first ones")
            titles = [toast.title for toast in app._notifications][:8]
            assert titles == [f"Checkpoint of {number}" for number in range(8)]
            await until_told(pilot, "92 more of these", "Log (6)")
            assert len(app._notifications) <= 9
            app.tell("later", "is told again")
            await until_told(pilot, "later", "is told again")

    run(body)


def test_in_a_small_terminal_no_toast_covers_that_phosd_is_gone() -> None:
    node, _ = fake_node(gpu(), process(1))

    async def body() -> None:
        async with opened(node, (40, 10)) as pilot:
            app = pilot.app
            assert isinstance(app, PhosApp)
            app.tell("Job 1: checkpoint of 1 is done", "20270115T080000-5f3a")
            await until_told(pilot, "is done")
            node.apply(Update(contact=Contact.GONE, trouble="it is away"))
            await until_shown(pilot, "No phosd for 0 s: it is away")
            app.tell("later", "is not told")
            app.tell("Checkpoint of 1", "phosd is away", "error")
            await until_told(pilot, "phosd is away")
            assert len(app._notifications) == 1

    run(body)


def test_the_node_changes_before_a_dialog_is_composed() -> None:
    """What the change took away is shown once the dialog is there."""
    node, _ = fake_node(gpu(), process(1))
    reasons = [""]

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            question = Question("Delete it?", "Delete", lambda: reasons[0])
            pilot.app.push_screen(question)
            reasons[0] = "It is gone"
            question.node_changed()  # nothing of it is mounted
            await until_shown(pilot, "It is gone")
            assert question.query_one("#yes", Button).disabled
            reasons[0] = ""
            question.node_changed()
            assert not question.query_one("#yes", Button).disabled

    run(body)


def test_an_entry_may_be_made_before_the_first_screen_is_there() -> None:
    """As Textual does where tasks begin at once, from Python 3.12 on."""
    node, _ = fake_node()
    PhosApp(node).clear_selection()
