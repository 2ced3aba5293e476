"""The GPUs, one at a time, over a node that the test leads."""

import re
from collections import deque

from phosd.client.records import Process
from phosd.tui.node import Node, Sample, Update
from tests.support.tui.fakes import NOW, FakeLink, fake_node, gpu, process
from tests.support.tui.opened import LARGE, opened, run, until, until_shown
from tests.support.tui.snapshots import settled, text


def two_gpus() -> tuple[Node, FakeLink]:
    first, second = gpu(0), gpu(1, memory_used=3 << 30)
    node, link = fake_node(
        first,
        second,
        process(1, device_bytes=35 << 30),
        process(2, device_bytes=5 << 30, gpus=(first.path, second.path)),
        process(3, device_bytes=1 << 30, gpus=(second.path,)),
    )
    for path, load in ((first.path, 0.5), (second.path, 0.25)):
        node.samples[path] = deque(
            Sample(NOW - 10 + n, load, 43 << 30, 61.0, 412.0 + n) for n in range(10)
        )
    return node, link


def test_one_gpu_with_its_figures_and_who_holds_how_much() -> None:
    node, _ = two_gpus()

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("5")
            await until_shown(pilot, "GPU 0: NVIDIA H200", "43.0 GiB of 141.0 GiB", "processes: 2")
            await until_shown(pilot, "Load: 50%, at most 50%", "█", "25%", "on 2 GPUs")
            lines = [line for line in text(pilot).splitlines() if "python" in line]
            assert [re.findall(r" ([12]) ", line)[0] for line in lines] == ["1", "2"]

    run(body)


def test_the_other_gpu() -> None:
    node, _ = two_gpus()

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("5", "right")
            await until_shown(pilot, "GPU 1: NVIDIA H200", "Load: 25%", "1.0 GiB")
            await pilot.press("left")
            await until_shown(pilot, "GPU 0: NVIDIA H200")
            await pilot.press("h")
            await until_shown(pilot, "GPU 1: NVIDIA H200")
            node.apply(Update(gone=frozenset({gpu(1).path})))
            await until_shown(pilot, "GPU 0: NVIDIA H200")
            await pilot.press("l")
            await until_shown(pilot, "Next GPU: not now", "there is no other GPU")

    run(body)


def test_the_charts_one_by_one_where_there_is_no_room_for_all() -> None:
    node, _ = two_gpus()

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("5")
            for told in ("Load: 50%", "Memory: 43.0 GiB", "Temperature: 61 °C", "Power: 421 W"):
                await until_shown(pilot, told)
                others = {"Load:", "Memory:", "Temperature:", "Power:"} - {told.split()[0]}
                assert not any(other in text(pilot) for other in others)
                await pilot.press("n")
            await until_shown(pilot, "Load: 50%")
            await pilot.resize_terminal(*LARGE)
            await until_shown(pilot, "Load: 50%", "Memory: 43.0", "Temperature: 61", "Power: 421 W")

    run(body)


def test_a_process_has_a_page_of_its_own() -> None:
    node, _ = two_gpus()

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("5", "enter")
            await until_shown(pilot, "1 python train.py", "Kernels")
            await pilot.press("q")
            await until_shown(pilot, "GPU 0")
            node.apply(Update(gone=frozenset(node.of(Process))))
            await until_shown(pilot, "nobody holds memory of it")
            await pilot.press("enter")
            await until_shown(pilot, "Process: not now", "there is no process")

    run(body)


def test_a_later_sample_is_drawn_and_a_missing_one_leaves_a_gap() -> None:
    node, _ = two_gpus()
    clock = [NOW]
    node.now = lambda: clock[0]

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("5")
            await until_shown(pilot, "Load: 50%")
            clock[0] += 60
            changed = gpu(0, utilisation=0.99)
            node.apply(Update({changed.path: changed}))
            node.sample()
            await until_shown(pilot, "Load: 99%, at most 99%")
            ground = next(line for line in text(pilot).splitlines() if " 0%┤" in line)
            _, _, columns = ground.partition("┤")
            assert "█ " in columns.rstrip() and columns.rstrip().endswith("█")

    run(body)


def test_without_nvml_it_says_so_in_a_line_and_draws_what_is_known() -> None:
    node, _ = fake_node(gpu(utilisation=None, temperature=None, power=None), process(1))
    node.sample()

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("5")
            await until_shown(
                pilot, "load, temperature, power: n/a, NVML does not tell", "Memory: 43.0 GiB"
            )
            assert "Load:" not in text(pilot) and "Power:" not in text(pilot)

    run(body)


def test_a_gpu_that_is_gone_is_not_shown_any_more() -> None:
    node, _ = two_gpus()

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("5")
            await until_shown(pilot, "GPU 0: NVIDIA H200", "Load: 50%")
            node.apply(Update({node.manager.path: node.manager}, whole=True))
            await until_shown(pilot, "phosd sees no GPU; `phos doctor` says what is missing")
            assert "Load" not in text(pilot) and "H200" not in text(pilot)

    run(body)


def test_whose_the_processes_are_that_are_not_listed() -> None:
    node, _ = fake_node(gpu(pids=(1, 98, 99), movers=(99,)), process(1, gpus=()))

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("5")
            await until_shown(pilot, "processes: 1 and phosd, 1 more that phosd does not show you")
            assert "python train.py" in text(pilot)

    run(body)


def test_no_gpus_at_all() -> None:
    node, _ = fake_node()

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("5", "right", "n")
            await until_shown(pilot, "phosd sees no GPU", "there is no other GPU")

    run(body)


def test_processes_of_others_are_told_without_their_names() -> None:
    node, _ = fake_node(gpu(pids=(1, 77, 78)), process(1))

    async def body() -> None:
        async with opened(node) as pilot:
            await pilot.press("5")
            await until_shown(pilot, "processes: 1, 2 more that phosd does not show you")

    run(body)


def test_names_that_would_do_something_to_the_terminal_and_any_size() -> None:
    odd = gpu(name="[b]GPU\x1b", uuid="\u202e[u]", utilisation=None)
    node, _ = fake_node(odd, process(1, command=("[red]x", "\x1b[2J", "模型" * 30), state="\x07s"))
    node.sample()

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press("5")
            await until_shown(pilot, "[b]GPU")
            for size in ((60, 20), (30, 8), (200, 60), (80, 24)):
                await pilot.resize_terminal(*size)
                shown = await settled(pilot)
                assert not {"\x1b", "\x07", "\u202e"} & set(shown)
                strips = pilot.app.screen._compositor.render_strips()
                assert {strip.cell_length for strip in strips} == {size[0]}
            await until(pilot, lambda: "[red]x" in text(pilot), "the name as it is")

    run(body)
