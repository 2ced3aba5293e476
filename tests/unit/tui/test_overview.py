"""The first screen says what is protected, and what needs somebody: eight programs of three users
on four GPUs.
"""

from pathlib import Path

import pytest
from textual.pilot import Pilot

from phosd.tui.node import Update
from tests.support.tui.fakes import FEATURES, NOW, fake_node, gpu, image, job, process
from tests.support.tui.full_node import full_node
from tests.support.tui.opened import opened, run, until_shown
from tests.support.tui.snapshots import compare, text


@pytest.mark.parametrize("width", [80, 120, 140, 200])
def test_first_screen(width: int) -> None:
    node, _ = full_node()

    async def body() -> None:
        async with opened(node, (width, 40)) as pilot:
            await until_shown(pilot, "2 failed in 24 h")
            await compare(pilot, f"overview-{width}x40")

    run(body)


def test_the_pane_shows_the_chosen_program_and_the_end_of_its_output(tmp_path: Path) -> None:
    output = tmp_path / "train.log"
    output.write_text("".join(f"step {number}\n" for number in range(500)))
    node, _ = full_node(output)

    async def body() -> None:
        async with opened(node, (200, 40)) as pilot:
            await until_shown(pilot, "✗ failed: newest image 3 h old", "by nobody that phosd knows")
            assert "step" not in text(pilot)
            await pilot.press("slash", *"llama", "enter")
            await until_shown(
                pilot, "● protected: newest image 12 s old", "by unit llama-ft.service"
            )
            await until_shown(
                pilot, "every 20 s, next in 8 s, 4 kept", "4, 296.8 GiB; newest llama"
            )
            await until_shown(pilot, "train.log", "step 498", "step 499")
            await pilot.resize_terminal(120, 40)
            await until_shown(pilot, "restarted by unit llama-ft.service", "the last 4 are kept")
            assert "step 499" not in text(pilot)

    run(body)


def test_the_order_changes_when_time_makes_a_program_late() -> None:
    node, _ = full_node()
    clock = [NOW]
    node.now = lambda: clock[0]

    def first(pilot: Pilot[None]) -> list[str]:
        rows = [line.strip("▶ ").split()[0] for line in text(pilot).splitlines()[5:18] if line]
        return [row for row in rows if row in ("bert-eval", "vae", "whisper", "rl-agent")]

    async def body() -> None:
        async with opened(node, (80, 40)) as pilot:
            assert first(pilot) == ["rl-agent", "whisper", "bert-eval", "vae"]
            clock[0] += 300
            await until_shown(pilot, "▲ late 46 min", "▲ 2 late")
            assert first(pilot) == ["rl-agent", "vae", "whisper", "bert-eval"]

    run(body)


def test_all_is_well_in_a_few_words() -> None:
    saved = image(created=NOW - 5)
    made = [process(n, every=60.0, last_image=saved.id) for n in (1, 2)]
    node, link = fake_node(gpu(), *made, saved, features=(*FEATURES, "storage"))
    link.answers["GetStorage"] = [100 << 30, 60 << 30, 30 << 30, 50 << 30]

    async def body() -> None:
        async with opened(node, (120, 24)) as pilot:
            await until_shown(
                pilot, "1 GPU   2 programs:  ● all 2 protected", "none failed in 24 h",
                "disk 60%, 60.0 GiB free, images and suspended 30.0 GiB of your 50.0 GiB",
            )  # fmt: skip

    run(body)


def test_a_program_with_a_schedule_has_ended() -> None:
    saved = image(name="bert", created=NOW - 60)
    done = job(state="done", scheduled=True, result=saved.id, ended=NOW - 59)
    node, _ = fake_node(gpu(), process(5, last_image="", name="llama"), saved, done)

    async def body() -> None:
        async with opened(node, (120, 24)) as pilot:
            await until_shown(pilot, "1 program:  ○ 1 never saved  □ 1 ended")

    run(body)


def test_a_phosd_that_tells_no_storage_is_not_asked_and_a_failure_is_counted() -> None:
    node, link = fake_node(gpu(), process(1))

    async def body() -> None:
        async with opened(node, (120, 24)) as pilot:
            await until_shown(pilot, "none failed in 24 h")
            assert "disk" not in text(pilot) and link.asked == []
            failed = job(1, target="1", state="failed", ended=NOW - 60, message="no [room]")
            node.apply(Update({failed.path: failed}))
            await until_shown(pilot, "✗ 1 failed in 24 h", "✗ failed", "1 min ago: no [")

    run(body)
