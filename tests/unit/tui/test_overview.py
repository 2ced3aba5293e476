"""The first screen says what is protected, and what needs somebody: eight programs of three users
on four GPUs.
"""

from collections import deque
from pathlib import Path

import pytest
from textual.pilot import Pilot

from phosd.client.records import Image, Process
from phosd.tui.node import Node, Sample, Update
from tests.support.tui.fakes import FEATURES, NOW, FakeLink, fake_node, gpu, image, job, process
from tests.support.tui.opened import opened, run, until_shown
from tests.support.tui.snapshots import compare, text

OFFERED = (*FEATURES, "storage", "history-filters", "suspend", "migrate")
_UIDS = {"ann": 1000, "bob": 1001, "cy": 1002}
_GIB = 1 << 30


def program(number: int, name: str, user: str, gpus: str, size: int, **changes: object) -> Process:
    values: dict[str, object] = {
        "name": name,
        "user": _UIDS[user],
        "user_name": user,
        "gpus": tuple(gpu(int(each)).path for each in gpus.split()),
        "device_bytes": size * _GIB,
        "command": ("python", f"{name or 'notebook'}.py", "--lr", "3e-4"),
        "last_image": f"{name}-4",
        "keep": 4,
    }
    return process(11250 + number, **(values | changes))


def images(name: str, user: str, age: float, every: float, size: float) -> list[Image]:
    stops = (0.61, 0.72, 0.58, 0.66)
    return [
        image(f"{name}-{number}", name=name, number=number, owner=_UIDS[user], owner_name=user,
              created=NOW - age - every * (4 - number), stored_bytes=int(size * _GIB),
              stop_seconds=stop)
        for number, stop in enumerate(stops, 1)
    ]  # fmt: skip


def full_node(output: Path | None = None) -> tuple[Node, FakeLink]:
    node, link = fake_node(
        gpu(0, memory_used=95 * _GIB, utilisation=0.97, temperature=71.0, power=612.0),
        gpu(1, memory_used=126 * _GIB, utilisation=0.88, temperature=78.0, power=540.0),
        gpu(2, memory_used=129 * _GIB, utilisation=1.0, temperature=86.0, power=688.0),
        gpu(3, memory_used=17 * _GIB, utilisation=0.21, temperature=44.0, power=160.0),
        program(1, "llama-ft", "ann", "0", 74, every=20.0, restarter="unit llama-ft.service",
                output=(str(output),) if output else ()),
        program(2, "bert-eval", "ann", "0", 18, every=1800.0),
        program(3, "vae", "cy", "3", 8, every=1800.0),
        program(4, "diffusion", "cy", "1", 60, last_image="", restarter="Slurm job 4711"),
        program(5, "moe-pretrain", "bob", "2 1", 128, every=600.0, restarter="pod bob/moe-0"),
        program(6, "whisper", "bob", "", 0, state="suspended", reason="its memory is in RAM"),
        program(7, "", "cy", "3", 7, last_image="", hook="driver",
                reason="started without `phos run`"),
        program(8, "rl-agent", "bob", "2", 63, every=900.0),
        *images("llama-ft", "ann", 12, 20, 74.2),
        *images("bert-eval", "ann", 700, 1800, 18.1),
        *images("vae", "cy", 2460, 1800, 8.3),
        *images("moe-pretrain", "bob", 432, 600, 128.9),
        *images("whisper", "bob", 86_400 * 3, 86_400, 4.4),
        *images("rl-agent", "bob", 11_000, 900, 63.4),
        job(21, target="11258", state="failed", error="OutOfSpace", started=NOW - 125,
            ended=NOW - 120, message="the disk has 1.2 GiB free and 63.0 GiB are needed; remove "
            "images", cancelable=False),
        *(job(number, target=str(11250 + target), state="done", ended=NOW - 400 + 19 * number,
              result=f"{name}-4", stop_seconds=0.66, cancelable=False)
          for number, (target, name) in enumerate(
              [(2, "bert-eval"), (1, "llama-ft"), (5, "moe-pretrain"), (1, "llama-ft"),
               (3, "vae"), (1, "llama-ft")], 10)),
        job(22, target="11255", phase="drain", progress=0.42),
        features=OFFERED,
    )  # fmt: skip
    link.answers["GetStorage"] = [2 << 40, 290 * _GIB, 1500 * _GIB, 0]
    link.answers["ListHistory"] = [
        {"id": 9, "operation": "checkpoint", "target": "815", "state": "failed", "ended": NOW - 99}
    ]
    for number in range(4):
        node.samples[gpu(number).path] = deque(
            Sample(NOW - 60 + 2 * n, (n * (number + 3) % 10) / 10, 0, 50.0, 300.0)
            for n in range(30)
        )
    return node, link


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
                "disk 60%, 60.0 GiB free, images 30.0 GiB of your 50.0 GiB",
            )  # fmt: skip

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
