"""The home screen, over a node that the test leads."""

import asyncio
from dataclasses import replace

from textual.widgets import Input, Select

from phosd.bus import ROOT
from phosd.client.errors import CommandError
from phosd.client.records import Phase
from phosd.tui.node import Contact, Update
from phosd.tui.widgets.table import RecordTable
from tests.support.tui.fakes import FEATURES, NOW, fake_node, gpu, image, job, process
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told
from tests.support.tui.snapshots import settled, text

MODES = ("mode-concurrent", "mode-recopy", "mode-stop", "mode-driver")


def test_one_key_saves_the_process_and_one_sees_it_happen() -> None:
    node, link = fake_node(gpu(), process(4711))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("c")
            await until(pilot, lambda: link.asked == [("Checkpoint", 4711)], "the call")
            running = job(1, stopped=True, phase="quiesce", progress=None)
            node.apply(Update({running.path: running}))
            await until_shown(pilot, "■ quiesce", "■ stopped job 1: checkpoint 4711")
            draining = job(1)
            node.apply(Update({draining.path: draining}))
            await until_shown(pilot, "▶ drain 50%", "20.0 GiB/s", "1.00 s")
            made = image("20270115T080000-5f3a", created=NOW - 61)
            done = job(1, state="done", result=made.id, cancelable=False)
            saved = process(4711, last_image=made.id)
            node.apply(Update({r.path: r for r in (done, made, saved)}))
            await until_told(pilot, "Job 1: checkpoint of 4711 is done", made.id, "0.84 s")
            await until_shown(pilot, " 1 min ", f"last image {made.id}")

    run(body)


def test_all_marked_are_saved() -> None:
    node, link = fake_node(process(1), process(2), process(3))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("space", "down", "space", "c")
            wanted = [("Checkpoint", 1), ("Checkpoint", 3)]
            await until(pilot, lambda: sorted(link.asked) == wanted, "the calls")

    run(body)


def test_a_checkpoint_with_options() -> None:
    node, link = fake_node(process(1), features=(*FEATURES, *MODES, "release-cached"))

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("C")
            await until_shown(pilot, "Checkpoint of 1 (python train.py --epochs 3)")
            screen = pilot.app.screen
            assert len(screen.query_one("#mode", Select)._options) == 1 + len(MODES)
            screen.query_one("#mode", Select).value = "recopy"
            screen.query_one("#release_cached", Select).value = "yes"
            await pilot.click("#go")
            await until(pilot, lambda: link.asked, "the call")
            ((member, pid, options),) = link.asked
            assert (member, pid) == ("Checkpoint", 1)
            assert {name: variant.value for name, variant in options.items()} == {
                "mode": "recopy",
                "fallback": "auto",
                "tcp": "refuse",
                "release_cached": True,
            }

    run(body)


def test_a_schedule() -> None:
    node, link = fake_node(process(1), features=(*FEATURES, *MODES, "periodic", "rehearsals"))

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("A")
            await until_shown(pilot, "Schedule of 1 (python train.py --epochs 3)", "10min")
            screen = pilot.app.screen
            screen.query_one("#every", Input).value = "0.5s"
            screen.query_one("#keep", Input).value = "none"
            await pilot.click("#go")
            await until_shown(pilot, "'0.5s' is neither 'never'", "'none' is no number")
            screen.query_one("#every", Input).value = "1h30min"
            screen.query_one("#keep", Input).value = "3"
            screen.query_one("#rehearse", Select).value = "yes"
            screen.query_one("#every", Input).focus()
            await pilot.press("enter")
            await until(pilot, lambda: link.asked, "the call")
            ((member, pid, options),) = link.asked
            assert (member, pid) == ("Checkpoint", 1)
            assert {name: variant.value for name, variant in options.items()} == {
                "mode": "auto",
                "every": 5400.0,
                "keep": 3,
                "rehearse": True,
            }

    run(body)


def test_a_schedule_is_shown_as_it_is_and_ended() -> None:
    node, link = fake_node(process(1, every=900.0, keep=4), features=(*FEATURES, "periodic"))
    link.answers["Checkpoint"] = "/"

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("A")
            await until_shown(pilot, "Schedule of 1", "15min")
            screen = pilot.app.screen
            assert screen.query_one("#keep", Input).value == "4"
            screen.query_one("#every", Input).value = "never"
            await pilot.click("#go")
            await until_told(pilot, "1 has no periodic checkpoints any more")
            ((_, _, options),) = link.asked
            assert {name: variant.value for name, variant in options.items()} == {"every": 0.0}

    run(body)


def test_a_form_that_one_leaves_does_nothing() -> None:
    node, link = fake_node(process(1))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("C")
            await until_shown(pilot, "Checkpoint of 1")
            await pilot.press("escape")
            await until(pilot, lambda: len(pilot.app.screen_stack) == 1, "the form to go")
            assert link.asked == []

    run(body)


def test_what_is_known_of_kernels() -> None:
    features = (*FEATURES, "process-kernels", "kernel-analysis")
    node, link = fake_node(process(4711), features=features)
    names = ("copy", "chase", "new", "other")
    link.answers["ListKernels"] = [[name, "00ff", 9 - n, False] for n, name in enumerate(names)]
    known = {"Module": "00ff", "State": "analysed", "RangesRead": True, "RangesWritten": True}
    link.answers["DescribeKernels"] = [
        known | {"Name": "copy", "Idempotent": "always"},
        known | {"Name": "chase", "UnknownReads": ["loaded"]},
        {"Name": "new", "Module": "00ff", "State": "waiting"},
    ]

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("enter", "left")
            await until_shown(pilot, "ACCESSES", "ranges", "always", "unknown: loaded", "waiting")
            link.answers["DescribeKernels"] = CommandError("Busy", "a job works on it; wait")
            await pilot.press("a")
            await until(pilot, lambda: "unknown: loaded" not in text(pilot), "the short answer")
            await until_shown(pilot, "copy", "other")

    run(body)


def test_a_process_that_ends_under_its_form() -> None:
    node, link = fake_node(gpu(), gpu(1), process(1), process(2), features=(*FEATURES, "migrate"))

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("space", "space", "C")
            await until_shown(pilot, "Checkpoint of 2 processes")
            node.apply(Update(gone=frozenset({process(1).path})))
            await pilot.press("enter")
            await until(pilot, lambda: [asked[:2] for asked in link.asked], "the call")
            assert [asked[:2] for asked in link.asked] == [("Checkpoint", 2)]
            for key, form in (("C", "Checkpoint of 2 ("), ("m", "Migration of 2 (")):
                node.apply(Update({process(2).path: process(2)}))
                table = pilot.app.screen.query_one(RecordTable)
                await until(pilot, lambda: table.current, "the process")  # noqa: B023
                await pilot.press(key)
                await until_shown(pilot, form)
                node.apply(Update(gone=frozenset({process(2).path})))
                await until_shown(pilot, "It has ended.")
                assert pilot.app.screen.query_one("#go").disabled
                await pilot.click("#go")
                await pilot.press("escape")
                await until(pilot, lambda: len(pilot.app.screen_stack) == 1, "the form to go")
            assert len(link.asked) == 1

    run(body)


def test_an_error_is_told_with_its_next_step() -> None:
    node, link = fake_node(process(1))
    link.answers["Checkpoint"] = CommandError(
        "NotAuthorized", "process 1 belongs to uid 7; ask as its owner or as root"
    )

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("c")
            await until_told(pilot, "Checkpoint of 1: NotAuthorized", "ask as its owner")

    run(body)


def test_a_failed_job_says_why_and_what_next() -> None:
    node, link = fake_node(process(4711))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("c")
            await until(pilot, lambda: link.asked, "the call")
            failed = job(
                1, state="failed", error="OutOfSpace", message="the disk is full; free 4 GiB"
            )
            node.apply(Update({failed.path: failed}))
            await until_told(pilot, "has failed", "the disk is full; free 4 GiB")

    run(body)


def test_a_daemon_that_is_slow_holds_nothing_up() -> None:
    node, link = fake_node(process(1), process(2))
    link.slow["Checkpoint"] = asyncio.Event()

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("c")
            await until_shown(pilot, "… ● phosd")
            await pilot.press("down", "2")
            await until(pilot, lambda: pilot.app.current_mode == "jobs", "the other screen")
            await pilot.press("1")
            link.slow["Checkpoint"].set()
            await until(pilot, lambda: "…" not in text(pilot).splitlines()[0], "the answer")

    run(body)


def test_the_banner_comes_and_goes_and_what_was_known_stays() -> None:
    node, _ = fake_node(process(4711))
    clock = [NOW]
    node.now = lambda: clock[0]

    async def body() -> None:
        async with opened(node) as pilot:
            clock[0] += 100
            trouble = "phosd does not run on this bus; start it (`systemctl start phosd`)"
            node.apply(Update(contact=Contact.GONE, trouble=trouble))
            await until_shown(pilot, "systemctl start", "is 1 min old", "4711", "✗ phosd")
            node.apply(Update(contact=Contact.SEEKING))
            clock[0] += 5
            await until_shown(pilot, "Waiting for phosd, for 5 s")
            node.apply(Update({ROOT: node.manager}, whole=True, contact=Contact.HERE))
            await until_shown(pilot, "● phosd", "no GPU processes")
            assert "Waiting" not in await settled(pilot)

    run(body)


def test_troubles_of_the_daemon_are_told() -> None:
    node, _ = fake_node(process(1))
    troubled = replace(node.manager, troubles=("image [x] cannot be read; see its log", "two"))
    node.apply(Update({troubled.path: troubled}))

    async def body() -> None:
        async with opened(node) as pilot:
            assert "! image [x] cannot be read; see its log (and 1 more)" in text(pilot)

    run(body)


def test_why_a_process_has_no_hook_is_told_and_what_cannot_be_saved_is_dimmed() -> None:
    node, link = fake_node(
        process(1, hook="driver", reason="started without `phos run`"),
        process(2, hook="unsupported", reason="it uses managed memory", every=60.0, keep=5),
        features=(*FEATURES, "process-log"),
    )

    async def body() -> None:
        async with opened(node) as pilot:
            assert "driver: started without `phos run`" in text(pilot)
            await pilot.press("L")
            await until_told(pilot, "1 has no hook; start it with `phos run`")
            pilot.app.clear_notifications()
            await pilot.press("down")
            await until_shown(
                pilot, "cannot be saved: ", "it uses managed memory; saved every 1 min"
            )
            await pilot.press("c")
            await until_told(pilot, "2 cannot be saved: it uses managed memory")
            assert link.asked == []

    run(body)


def test_what_a_gpu_does_not_tell_takes_no_room() -> None:
    silent = gpu(utilisation=None, temperature=None, power=None, memory_used=41 << 30)
    node, _ = fake_node(silent, process(1, name="bert"))

    async def body() -> None:
        async with opened(node, (120, 24)) as pilot:
            await until_shown(pilot, "41.0 of 141.0 GiB   █ bert 40.0 GiB  ░ others 1.0 GiB")
            assert "%" not in text(pilot) and "°C" not in text(pilot)

    run(body)


def test_at_eighty_columns_there_is_room_for_the_history_of_the_load() -> None:
    node, _ = fake_node(gpu(), process(1))

    async def body() -> None:
        async with opened(node) as pilot:
            for load in (0.0, 1.0, 0.5):
                loaded = gpu(utilisation=load)
                node.apply(Update({loaded.path: loaded}))
                node.sample()
            await until_shown(pilot, "▁█▅  50%", "61 °C", "412 W")

    run(body)


def test_many_gpus_leave_room_for_the_processes() -> None:
    node, _ = fake_node(*(gpu(number) for number in range(16)), process(1))

    async def body() -> None:
        async with opened(node) as pilot:
            assert "and 13 more GPUs" in text(pilot)
            assert "running" in text(pilot)
            await pilot.resize_terminal(*LARGE)
            await until_shown(pilot, "and 8 more GPUs")

    run(body)


def test_names_with_markup_controls_and_wide_characters() -> None:
    hostile = ("[bold red]x[/]", "\x1b[2J\x07", "\u202emoc", "模型" * 30)
    node, _ = fake_node(
        gpu(name="[blink]GPU[/]"),
        process(1, command=hostile, state="[reverse]s", reason="\x1b]0;title\x07", hook="driver"),
        job(1, target="1", operation="[b]op", phase="\x1bphase"),
    )

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            for key in ("", "enter", "q", "2", "enter", "q", "question_mark", "q"):
                await pilot.press(*([key] if key else []))
                shown = await settled(pilot)
                assert "\x1b" not in shown and "\x07" not in shown and "\u202e" not in shown
                strips = pilot.app.screen._compositor.render_strips()
                assert {strip.cell_length for strip in strips} == {LARGE[0]}

    run(body)


def test_sixty_columns_and_resizing_in_the_middle() -> None:
    phases = tuple(Phase(f"phase{n}", n % 2 == 1, 0.1, 0, 0) for n in range(20))
    node, _ = fake_node(gpu(), process(4711), job(1, phases=phases), image())

    async def body() -> None:
        async with opened(node, (60, 20)) as pilot:
            for key in ("1", "enter", "q", "2", "enter", "q", "1", "C"):
                await pilot.press(key)
                for size in ((60, 20), (200, 60), (30, 8), (80, 24)):
                    await pilot.resize_terminal(*size)
                    await settled(pilot)
                    strips = pilot.app.screen._compositor.render_strips()
                    assert {strip.cell_length for strip in strips} == {size[0]}
            await pilot.press("escape")
            await pilot.resize_terminal(60, 20)
            await until_shown(pilot, "4711", "1 Proc", "2 Jobs", "? Help")

    run(body)


def test_a_process_that_ends_under_its_details_and_its_log() -> None:
    features = (*FEATURES, "process-log", "process-blocks", "process-kernels")
    node, link = fake_node(process(4711), features=features)
    link.answers["ListBlocks"] = [[7, 0x7F0000000000, 2 << 20, 0, ["exported"]]]
    link.answers["ListKernels"] = [["sgemm[x]", "00ff", 12, True], ["relu", "00ff", 99, False]]
    link.answers["ReadLog"] = "launches 12\n\x1b[31mhook: parked"

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("enter")
            await until_shown(pilot, "Images", "no image of it yet")
            await pilot.press("right", "right")
            await until_shown(pilot, "0x7f0000000000", "exported")
            await pilot.press("right")
            await until_shown(pilot, "! suspect", "sgemm[x]", "relu")
            assert text(pilot).index("sgemm") < text(pilot).index("relu")
            gone = frozenset({process(4711).path})
            node.apply(Update(gone=gone))
            await until_shown(pilot, "(it has ended)")
            link.answers["ListKernels"] = CommandError("NoSuchProcess", "4711 is gone; `phos ps`")
            await pilot.press("b")
            await until_shown(pilot, "(it has ended)")
            await pilot.press("q")
            node.apply(Update({process(4711).path: process(4711)}))
            await until_shown(pilot, "L Log")
            await pilot.press("L")
            await until_shown(pilot, "launches 12", "\\x1b[31mhook: parked")
            link.answers["ReadLog"] = CommandError("Busy", "job 3 works on it; wait until it ended")
            await until_shown(pilot, "Busy: job 3 works on it", "launches 12")
            node.apply(Update(gone=gone))
            await until_shown(pilot, "4711 (it has ended)")

    run(body)
