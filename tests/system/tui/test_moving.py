"""Moving processes from their screen: where they can go, suspending, resuming, how it is told."""

import dataclasses

import pytest
from textual.widgets import Select

from phosd.client.records import Process
from phosd.tui.link import BusLink
from phosd.tui.node import Node, Update
from phosd.tui.screens import moving
from phosd.tui.widgets.dialogs import Form
from tests.support.fake_engine import GPU
from tests.support.service import Service
from tests.support.tui.fakes import FEATURES, fake_node, gpu, job, process
from tests.support.tui.opened import LARGE, opened, run, until, until_shown, until_told
from tests.support.tui.snapshots import text
from tests.system.tui.test_service import PID, this_one

MOVING = (*FEATURES, "migrate", "suspend", "resume")
PATHS = [gpu(number).path for number in range(4)]
ROOM = gpu(1, memory_used=10 << 30)
MORE_ROOM = gpu(2, memory_used=1 << 30)
ANOTHER_KIND = gpu(3, name="NVIDIA L4", memory_used=0)


def values(given: Process) -> list[list[tuple[str, str]]]:
    """What the dialog offers for a process."""
    node, _ = fake_node(gpu(0), ROOM, MORE_ROOM, ANOTHER_KIND, given, features=MOVING)
    assert moving.why_not_migrate(node, [given]) == ""
    return [list(choice.values) for choice in moving.choices(node, [given])]


def test_the_gpu_with_most_room_comes_first_and_only_its_kind() -> None:
    assert values(process(1)) == [
        [
            ("GPU 2: NVIDIA H200, 140.0 GiB free", "GPU-2"),
            ("GPU 1: NVIDIA H200, 131.0 GiB free", "GPU-1"),
        ]
    ]


def test_each_gpu_of_a_process_on_several_stays_unless_one_says_where() -> None:
    first, second = values(process(1, gpus=tuple(PATHS[:2])))
    assert [value for _, value in first] == ["", "GPU-2", "GPU-1"]
    assert [value for _, value in second] == ["", "GPU-2", "GPU-0"]
    assert moving.destination({"GPU-0": "GPU-1", "GPU-1": "GPU-0"}) == "GPU-0:GPU-1,GPU-1:GPU-0"
    assert moving.destination({"GPU-0": "", "GPU-1": "GPU-2"}) == "GPU-1:GPU-2"


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ([process(1, hook="driver")], "1 was not started with `phos run`; `phos migrate --mode"),
        ([process(1, state="suspended", gpus=())], "1 is suspended; `s` resumes it"),
        ([process(1, gpus=(PATHS[3],))], "no other GPU of the kind that 1 is on"),
        ([process(2), process(1, gpus=tuple(PATHS[:2]))], "1 is on several GPUs"),
        ([process(1), process(2, hook="unsupported")], "2 was not started"),
    ],
)
def test_why_there_is_nowhere_to_go(chosen: list[Process], why: str) -> None:
    node, _ = fake_node(gpu(0), ROOM, MORE_ROOM, ANOTHER_KIND, *chosen, features=MOVING)
    assert why in moving.why_not_migrate(node, chosen)


def test_migrate_asks_where_and_tells_the_end() -> None:
    node, link = fake_node(gpu(0), ROOM, MORE_ROOM, process(4711), features=MOVING)

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("m")
            await until_shown(pilot, "Migration of 4711", "GPU 2: NVIDIA H200, 140.0 GiB free")
            pilot.app.screen.query_one("#to", Select).value = "GPU-1"
            await pilot.click("#go")
            await until(pilot, lambda: link.asked == [("Migrate", 4711, "GPU-1")], "the call")
            going = job(1, operation="migrate", phase="precopy", destination="GPU-1", mode="auto")
            node.apply(Update({going.path: going}))
            await until_shown(pilot, "▶ precopy 50%", "migrate 4711")
            done = job(1, operation="migrate", state="done", result="0:1", destination="GPU-1")
            node.apply(Update({done.path: done}))
            await until_told(pilot, "migrate of 4711 is done", "on GPU 1; the program stood still")
            await pilot.press("2", "enter")
            await until_shown(pilot, "destination   GPU-1", "on GPU 1")

    run(body)


def test_a_migration_that_one_thinks_better_of() -> None:
    node, link = fake_node(gpu(0), ROOM, process(1), features=MOVING)

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("m")
            await until(pilot, lambda: isinstance(pilot.app.screen, Form), "the dialog")
            await pilot.press("escape")
            await until(pilot, lambda: not isinstance(pilot.app.screen, Form), "its end")
            assert link.asked == []

    run(body)


def test_suspend_and_resume_by_what_the_process_is() -> None:
    node, link = fake_node(gpu(0), process(4711), features=MOVING)

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("s")
            await until_shown(pilot, "Suspend 4711 (", "stands still until it is resumed")
            await pilot.press("n", "s", "y")
            await until(pilot, lambda: link.asked == [("Suspend", 4711)], "the call")
            done = job(1, operation="suspend", state="done", result="memory", stop_seconds=2.0)
            node.apply(Update({done.path: done}))
            await until_told(pilot, "suspend of 4711 is done", "in host memory")
            assert not any("stood still" in toast.message for toast in pilot.app._notifications)
            why = "its device memory is in host memory"
            asleep = process(4711, state="suspended", gpus=(), device_bytes=0, reason=why)
            node.apply(Update({asleep.path: asleep}))
            await until_shown(pilot, "suspended: its device memory", "s Resume")
            assert "m (Migrate)" in text(pilot) and "c (Checkpoint)" in text(pilot)
            await pilot.press("c")
            await until_told(pilot, "Checkpoint: not now", "4711 is suspended; `s` resumes it")
            await pilot.press("s")
            await until(pilot, lambda: link.asked[1:] == [("Resume", 4711)], "the call")
            done = job(2, operation="resume", state="done", result="0:1,1:0", stop_seconds=0.0)
            node.apply(Update({done.path: done}))
            await pilot.press("2")
            await until_shown(pilot, "on GPUs 1, 0")

    run(body)


def test_what_has_no_hook_is_dimmed_with_the_reason() -> None:
    node, link = fake_node(gpu(0), ROOM, process(1, hook="driver"), features=MOVING)

    async def body() -> None:
        async with opened(node) as pilot:
            assert "m (Migrate)" in text(pilot) and "s (Suspend)" in text(pilot)
            await pilot.press("s")
            await until_told(pilot, "Suspend: not now", "1 was not started with `phos run`")
            assert link.asked == []

    run(body)


def test_a_swap_is_shown_at_both() -> None:
    swap = job(1, operation="swap", target="1 2", phase="save")
    node, _ = fake_node(gpu(0), process(1), process(2, state="suspended"), swap, features=MOVING)

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            assert text(pilot).count("▶ save 50%") == 2
            assert "swap 1 2" in text(pilot)
            await pilot.press("down", "enter")
            await pilot.press("right")
            await until_shown(pilot, "swap", "save")

    run(body)


def test_the_keys_do_it_over_a_real_service(service: Service) -> None:
    other = dataclasses.replace(GPU, ordinal=1, uuid="GPU-5678-cd", memory_total=8 << 30)
    service.engine.devices = [GPU, other]
    service.engine.running = [this_one()]
    service.engine.go.set()

    async def body() -> None:
        node = Node(BusLink(service.address))
        async with opened(node, LARGE) as pilot:
            await until_shown(pilot, str(PID))
            await until(pilot, lambda: len(node.gpus) == 2, "the second GPU")
            await until(pilot, lambda: node.process(PID).gpus, "its GPU")  # type: ignore[union-attr]
            await pilot.press("m")
            await until_shown(pilot, f"Migration of {PID}", "GPU 1: A test's GPU, 8.0 GiB free")
            await pilot.click("#go")
            await until_told(pilot, f"migrate of {PID} is done", "on GPU 1")
            await pilot.press("s", "y")
            await until_told(pilot, f"suspend of {PID} is done", "in host memory")
            await until_shown(pilot, "suspended")
            await pilot.press("s")
            await until_told(pilot, f"resume of {PID} is done", "on GPU 0")

    run(body)
    calls = [(move[0], move[1]) for move in service.engine.moves]
    assert calls == [("migrate", PID), ("suspend", PID), ("resume", PID)]
    assert service.engine.moves[0][2] == "GPU-5678-cd"
