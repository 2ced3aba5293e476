"""The images and one of them, over a node that the test leads."""

import time
from typing import Any

from textual.pilot import Pilot
from textual.widgets import Button, Input, Select

from phosd.client.errors import CommandError
from phosd.tui.node import Update
from phosd.tui.widgets.dialogs import Form, Question
from tests.support.tui.fakes import FEATURES, NOW, fake_node, image, job, process
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told
from tests.support.tui.snapshots import settled, text

OLD, NEW = "20270115T070000-aaaa", "20270115T080000-bbbb"
DETAILED = (*FEATURES, "image-blocks")


def two(**changes: Any) -> list[Any]:
    """An image and its child."""
    old = image(OLD, created=NOW - 3900, whole=True, verified=NOW - 60)
    return [old, image(NEW, parent=OLD, shared_bytes=30 << 30, **changes)]


async def asks(pilot: Pilot[None]) -> Question:
    await until(pilot, lambda: isinstance(pilot.app.screen, Question), "the question")
    screen = pilot.app.screen
    assert isinstance(screen, Question)
    return screen


def test_one_sees_what_there_is() -> None:
    node, _ = fake_node(*two())

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("3")
            await until_shown(pilot, OLD, NEW, "41.0 GiB", "30.0 GiB", "✓ 1 min ago", "never")
            assert text(pilot).index(NEW) < text(pilot).index(OLD)
            assert "parent 20270115T070000-aaaa" in text(pilot)
            node.apply(Update(gone=frozenset({two()[0].path})))
            await until_shown(pilot, "parent 20270115T070000-aaaa (deleted)")

    run(body)


def test_the_name_of_a_program_and_whether_it_runs() -> None:
    running = process(4711, name="bert")
    node, _ = fake_node(*two(name="bert", number=3, note="before [the] rate"), running)

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("3")
            await until_shown(
                pilot,
                "bert@3",
                "“before [the] rate”",
                "process 4711 runs; a restore needs that it has ended",
            )
            node.apply(Update(gone=frozenset({running.path})))
            await until(pilot, lambda: "4711 runs" not in text(pilot), "its end to be shown")
            await pilot.press("enter")
            await until_shown(pilot, f"bert@3, {NEW}", "note: before [the] rate")

    run(body)


def test_a_rehearsal_counts_as_a_verification() -> None:
    old, new = two(rehearsed=NOW - 7200, rehearsal_error="its file is gone")
    rehearsed = image("20270115T060000-cccc", rehearsed=NOW - 120, whole=True, verified=NOW - 999)
    node, _ = fake_node(old, new, rehearsed)

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("3")
            await until_shown(pilot, "✗ no restore 2 h", "✓ 1 min ago", "✓ rehearsed 2 min")
            await until_shown(pilot, "rehearsed, and failed: its file is gone")

    run(body)


def test_restore_brings_an_image_back_and_tells_the_end() -> None:
    node, link = fake_node(*two())

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3", "down", "r")
            await until(pilot, lambda: link.asked == [("Restore", OLD)], "the call")
            going = job(1, operation="restore", target=OLD, phase="fill")
            node.apply(Update({going.path: going}))
            await until_shown(pilot, "▶ restore 50%")
            done = job(1, operation="restore", target=OLD, state="done", result="4711")
            node.apply(Update({done.path: done}))
            await until_shown(pilot, "Job 1: restore of", "the program stood still")

    run(body)


def test_restore_with_options() -> None:
    node, link = fake_node(*two())

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("3", "R")
            await until_shown(pilot, f"Restore {NEW} of 4711 (python train.py)")
            form = pilot.app.screen
            form.query_one("#files", Select).value = "cut"
            form.query_one("#output", Input).value = "train.log"
            await pilot.click("#go")
            await until_shown(pilot, "'train.log' is no absolute path")
            assert isinstance(pilot.app.screen, Form) and link.asked == []
            form.query_one("#output", Input).value = "/tmp/train.log"
            form.query_one("#output", Input).focus()
            await pilot.press("enter")
            await until(pilot, lambda: link.asked, "the call")
            ((member, name, options),) = link.asked
            assert (member, name) == ("Restore", NEW)
            given = {key: variant.value for key, variant in options.items()}
            assert given == {"files": "cut", "output": "/tmp/train.log"}

    run(body)


def test_a_clone_has_a_name() -> None:
    node, link = fake_node(*two(), features=(*FEATURES, "clones"))

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("3", "K")
            await until_shown(pilot, f"Clone {NEW} of 4711 (python train.py)")
            await pilot.click("#go")
            await until_shown(pilot, "a clone needs a name for its files")
            assert link.asked == []
            form = pilot.app.screen
            form.query_one("#clone", Input).value = "second"
            form.query_one("#clone_files", Select).value = "share"
            form.query_one("#clone", Input).focus()
            await pilot.press("enter")
            await until(pilot, lambda: link.asked, "the call")
            ((member, name, options),) = link.asked
            assert (member, name) == ("Restore", NEW)
            given = {key: variant.value for key, variant in options.items()}
            assert given == {"clone": "second", "clone_files": "share"}

    run(body)


def test_a_note_is_written_and_taken_away() -> None:
    node, link = fake_node(*two(note="before [the] rate"), features=(*FEATURES, "image-notes"))
    link.answers["SetNote"] = None

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            for note, told in (("the best", "it is written"), ("", "it has none any more")):
                await pilot.press("3", "N")
                await until_shown(pilot, f"Note of {NEW}", "before [the] rate")
                assert pilot.app.focused is pilot.app.screen.query_one("#note")  # one just types
                pilot.app.screen.query_one("#note", Input).value = note
                await pilot.press("enter")
                await until_told(pilot, f"Note of {NEW}", told)
            assert link.asked == [("SetNote", "the best"), ("SetNote", "")]

    run(body)


def test_a_rehearsal_takes_all_that_are_marked() -> None:
    node, link = fake_node(*two(), features=(*FEATURES, "rehearsals"))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3", "space", "space", "V")
            await until(pilot, lambda: len(link.asked) == 2, "the calls")
            assert {asked[:2] for asked in link.asked} == {
                ("VerifyImage", OLD),
                ("VerifyImage", NEW),
            }
            assert all(asked[2]["rehearse"].value is True for asked in link.asked)

    run(body)


def test_a_form_of_a_restore_that_one_leaves_does_nothing() -> None:
    node, link = fake_node(*two())

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3", "R")
            await until(pilot, lambda: isinstance(pilot.app.screen, Form), "the form")
            await pilot.press("escape")
            await until(pilot, lambda: len(pilot.app.screen_stack) == 1, "the form to go")
            assert link.asked == []

    run(body)


def test_verify_takes_all_that_are_marked() -> None:
    node, link = fake_node(*two())

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3", "space", "space", "v")
            wanted = [("VerifyImage", OLD), ("VerifyImage", NEW)]
            await until(pilot, lambda: sorted(link.asked) == wanted, "the calls")

    run(body)


def test_delete_asks_and_the_answer_is_no_unless_one_says_yes() -> None:
    node, link = fake_node(*two())
    link.answers["DeleteImage"] = None

    async def body() -> None:
        async with opened(node) as pilot:
            for refusal in ("enter", "n", "escape"):
                await pilot.press("3", "d")
                await asks(pilot)
                await until_shown(pilot, f"Delete image {NEW} of 4711", "41.0 GiB on disk")
                await pilot.press(refusal)
                await until(pilot, lambda: len(pilot.app.screen_stack) == 1, "it to go")
                assert link.asked == [], refusal
            await pilot.press("d")
            await asks(pilot)
            await pilot.press("right", "enter")
            await until(pilot, lambda: link.asked == [("DeleteImage", NEW)], "the call")
            await until_shown(pilot, f"Delete {NEW}", "it is deleted")

    run(body)


def test_delete_names_what_is_marked_and_deletes_all_of_it() -> None:
    names = [f"2027011{n}T080000-5f3a" for n in range(7)]
    node, link = fake_node(*(image(name, stored_bytes=1 << 30) for name in names))
    link.answers["DeleteImage"] = None

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3", *(["space"] * 7), "d")
            await asks(pilot)
            await until_shown(pilot, "Delete 7 images, 7.0 GiB on disk:", names[-1], "and 2 more")
            await pilot.press("y")
            await until(pilot, lambda: len(link.asked) == 7, "the calls")
            assert sorted(link.asked) == [("DeleteImage", name) for name in names]

    run(body)


def test_an_image_that_vanishes_while_its_dialog_is_open() -> None:
    node, link = fake_node(*two())

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3", "d")
            question = await asks(pilot)
            node.apply(Update(gone=frozenset({two()[1].path})))
            await until_shown(pilot, "It is not there any more.")
            assert question.query_one("#yes", Button).disabled
            await pilot.press("y")
            await pilot.pause()
            assert isinstance(pilot.app.screen, Question)
            await pilot.press("escape")
            await until(pilot, lambda: len(pilot.app.screen_stack) == 1, "it to go")
            assert link.asked == []

    run(body)


def test_only_those_that_are_still_there_are_deleted() -> None:
    node, link = fake_node(*two())
    link.answers["DeleteImage"] = None

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3", "space", "space", "d")
            await asks(pilot)
            node.apply(Update(gone=frozenset({two()[1].path})))
            await pilot.press("y")
            await until(pilot, lambda: link.asked, "the call")
            await pilot.pause()
            assert link.asked == [("DeleteImage", OLD)]

    run(body)


def test_a_refused_delete_says_what_to_do() -> None:
    node, link = fake_node(*two())
    link.answers["DeleteImage"] = CommandError("Busy", "job 3 reads it; wait until it has ended")

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3", "d")
            await asks(pilot)
            await pilot.press("y")
            await until_shown(pilot, f"Delete {NEW}: Busy", "wait until it has")

    run(body)


def test_without_an_image_nothing_can_be_done() -> None:
    node, link = fake_node(process(1))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3")
            await until_shown(pilot, "no images yet", "r (Restore)", "d (Delete)")
            await pilot.press("r", "R", "v", "d", "enter")
            await until_shown(pilot, "Restore: not now", "there is no image")
            assert link.asked == [] and len(pilot.app.screen_stack) == 1

    run(body)


def test_readonly_asks_for_nothing() -> None:
    node, link = fake_node(*two())

    async def body() -> None:
        async with opened(node, readonly=True) as pilot:
            for keys in (["3"], ["3", "enter"]):
                await pilot.press(*keys, "r", "R", "v", "d")
                await until_shown(pilot, "not now", "--readonly")
                assert not isinstance(pilot.app.screen, Question | Form)
            assert link.asked == []

    run(body)


def rows(count: int, first: int = 0) -> list[list[int]]:
    """Blocks as ``ListBlocks`` tells them."""
    return [[4711, n, 0x7F0000000000 + n, 1 << 20, 0, 1, 1 << 20, 1 << 19]
            for n in range(first, first + count)]  # fmt: skip


def test_the_page_of_an_image_tells_its_parents_and_its_content_in_load_order() -> None:
    node, link = fake_node(*two(why="it is hooked"), features=DETAILED)
    link.answers["ListBlocks"] = [
        [4711, 9, 0x7F0000200000, 2 << 20, 0, 2, 2 << 20, 1 << 20],
        [4712, 3, 0x7F0000000000, 2 << 20, -1, 0, 0, 0],
    ]

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("3", "enter")
            await until_shown(pilot, f"parents: {OLD}", "it is hooked", "0x7f0000200000")
            await until_shown(pilot, "50% 1.0 MiB", "the memory of another row")
            assert text(pilot).index("0x7f0000200000") < text(pilot).index("0x7f0000000000")
            ((member, options),) = link.asked
            asked = {name: variant.value for name, variant in options.items()}
            assert (member, asked) == ("ListBlocks", {"limit": 5000, "offset": 0})
            await pilot.press("P")
            await until_shown(pilot, "it stands alone")
            await pilot.press("P")
            await until_shown(pilot, "Parent: not now", "it has no parent")
            await pilot.press("q", "r")
            await until(pilot, lambda: ("Restore", NEW) in link.asked, "the restore")
            await pilot.press("v")
            await until(pilot, lambda: ("VerifyImage", NEW) in link.asked, "the verification")
            await pilot.press("R")
            await until_shown(pilot, f"Restore {NEW}")
            await pilot.press("escape", "d")
            await asks(pilot)
            await pilot.press("y")
            await until(pilot, lambda: ("DeleteImage", NEW) in link.asked, "the deletion")
            node.apply(Update(gone=frozenset({two()[1].path})))
            await until_shown(pilot, "(it is deleted)", "r (Restore)")

    run(body)


def test_an_image_of_many_blocks_is_read_page_by_page() -> None:
    node, link = fake_node(*two(), features=DETAILED)
    pages = [rows(5000), rows(5000, 5000), rows(7, 10_000)]

    async def pages_in_turn(*call: Any) -> list[Any]:
        link.asked.append(call)
        return [pages[len(link.asked) - 1]]

    link.call = pages_in_turn  # type: ignore[assignment,method-assign]

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3", "enter")
            await until(pilot, lambda: len(link.asked) == 3, "all pages")
            await until_shown(pilot, "10007")
            offsets = [call[4]["offset"].value for call in link.asked]
            assert offsets == [0, 5000, 10_000]

    run(body)


def test_what_an_image_holds_is_not_told() -> None:
    node, link = fake_node(*two(), features=DETAILED)
    link.answers["ListBlocks"] = CommandError("NotAuthorized", "it is another user's; ask as root")

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("3", "enter")
            await until_shown(pilot, "NotAuthorized: it is another user's; ask as root")

    run(body)
    older, _ = fake_node(*two())

    async def older_body() -> None:
        async with opened(older) as pilot:
            await pilot.press("3", "enter")
            await until_shown(pilot, "this phosd does not tell what is in an image")

    run(older_body)


def test_parents_that_go_in_a_circle() -> None:
    first = image(OLD, parent=NEW)
    node, _ = fake_node(first, image(NEW, parent=OLD))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3", "enter")
            await until_shown(pilot, f"parents: {OLD} ← {NEW} ← {OLD}")

    run(body)


def test_names_that_would_do_something_to_the_terminal() -> None:
    hostile = ("[bold red]x[/]", "\x1b[2J\x07", "\u202emoc", "模型" * 30)
    odd = image("[b]x\x1b[2J", command=hostile, mode="[i]m", why="\x1bwhy", parent="[u]p\x07",
                gpus=(("[x]\x1b", "\u202echip"),), owner_name="\x1b[31mroot")  # fmt: skip
    node, _ = fake_node(odd)

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            for keys in (["3"], ["enter"], ["q", "d"], ["escape", "R"]):
                await pilot.press(*keys)
                shown = await settled(pilot)
                assert "[b]x" in shown
                assert not {"\x1b", "\x07", "\u202e"} & set(shown)
                strips = pilot.app.screen._compositor.render_strips()
                assert {strip.cell_length for strip in strips} == {LARGE[0]}

    run(body)


def test_sixty_columns_and_resizing_in_the_middle() -> None:
    node, link = fake_node(*two(), features=DETAILED)
    link.answers["ListBlocks"] = rows(40)

    async def body() -> None:
        async with opened(node, (60, 20)) as pilot:
            for keys in (["3"], ["enter"], ["d"], ["escape", "R"]):
                await pilot.press(*keys)
                for size in ((60, 20), (200, 60), (30, 8), (80, 24)):
                    await pilot.resize_terminal(*size)
                    await settled(pilot)
                    strips = pilot.app.screen._compositor.render_strips()
                    assert {strip.cell_length for strip in strips} == {size[0]}

    run(body)


def test_five_thousand_images_stay_smooth() -> None:
    node, _ = fake_node(*(image(f"20270115T{n:06}-aaaa", pid=n) for n in range(5000)))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("3", "end")
            await until_shown(pilot, "5000", "20270115T000000-aaaa")
            taken = []
            for n in range(20):
                begun = time.thread_time()
                node.apply(Update({image(f"new-{n}").path: image(f"new-{n}", pid=n)}))
                await pilot.press("up")
                taken.append(time.thread_time() - begun)
            assert sorted(taken)[10] < 0.5, taken
            await until_shown(pilot, "5020")

    run(body)
