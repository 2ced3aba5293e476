"""From a key to what it paints, with 500 processes, 5,000 images and events at 20 a second."""

import asyncio
import statistics
import time
from dataclasses import replace
from typing import Any

import pytest
from rich.console import RenderableType
from textual.screen import Screen

from phosd.client.records import Job, Process
from phosd.tui.app import PhosApp
from phosd.tui.node import Node, Update
from phosd.tui.widgets.table import RecordTable
from tests.support.speed import seconds, slowness
from tests.support.tui.fakes import NOW, fake_node, gpu, image, job, process
from tests.support.tui.opened import LARGE, run

PROCESSES, IMAGES, EVENTS_A_SECOND = 500, 5000, 20
pytestmark = pytest.mark.timing(why="computing from a key to what it paints")
LIMIT = 0.05
"""Seconds at the median, on a machine of :data:`~tests.support.speed.REFERENCE`."""


class Watched(PhosApp):
    """Notes when something was painted."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self.animation_level = "none"
        self.painted = asyncio.Event()

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        super()._display(screen, renderable)
        self.painted.set()


def crowded() -> Node:
    """A node with all of that."""
    node, _ = fake_node(
        *(gpu(number) for number in range(8)),
        *(process(1000 + n, last_image=f"i{n}") for n in range(PROCESSES)),
        *(image(f"i{n}", pid=1000 + n % PROCESSES, created=NOW - n) for n in range(IMAGES)),
        *(job(n, target=str(1000 + n)) for n in range(1, 17)),
    )
    return node


async def events(node: Node) -> None:
    """Processes, jobs and GPUs change, for ever."""
    processes, jobs = list(node.of(Process).values()), list(node.of(Job).values())
    turn = 0
    while True:
        turn += 1
        one = replace(processes[turn % PROCESSES], device_bytes=turn << 20)
        other = replace(jobs[turn % len(jobs)], progress=turn % 100 / 100)
        node.apply(Update({one.path: one, other.path: other}))
        node.sample()
        await asyncio.sleep(1 / EVENTS_A_SECOND)


async def painted_after(app: Watched, key: str) -> tuple[float, float]:
    """Seconds from a key until the cursor is painted elsewhere: by the clock, and of computing."""
    table = app.screen.query_one(RecordTable)
    before = table.cursor
    began, computed = time.perf_counter(), time.thread_time()
    app.simulate_key(key)
    while True:
        app.painted.clear()
        await app.painted.wait()
        if table.cursor != before:
            return time.perf_counter() - began, time.thread_time() - computed


def test_a_key_is_painted_at_once() -> None:
    """Judged by the time that it takes to compute: a busy machine is no fault of the program."""
    node = crowded()

    async def body() -> None:
        app = Watched(node)
        async with app.run_test(size=LARGE) as pilot:
            for screen in ("1", "3"):
                await pilot.press(screen)
                await pilot.pause()
                noise = asyncio.create_task(events(node))
                taken = []
                for number in range(40):
                    taken.append(await painted_after(app, "up" if number % 3 == 2 else "down"))
                    await asyncio.sleep(0.02)
                noise.cancel()
                wall, computing = (statistics.median(times) for times in zip(*taken, strict=True))
                print(f"screen {screen}: {wall * 1e3:.1f} ms, {computing * 1e3:.1f} ms computing")
                assert computing < LIMIT * slowness(seconds())

    run(body)


def test_a_filter_over_thousands_narrows_at_once() -> None:
    node = crowded()

    async def body() -> None:
        app = Watched(node)
        async with app.run_test(size=LARGE) as pilot:
            await pilot.press("3")
            await pilot.pause()
            table = app.screen.query_one(RecordTable)
            times = []
            for text in ("i4", "i49", "i499", "i4999", ""):
                began = time.thread_time()
                table.set_filter(text)
                times.append(time.thread_time() - began)
            assert table.shown == IMAGES
            assert statistics.median(times) < LIMIT

    run(body)
