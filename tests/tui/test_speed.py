"""How quick the screens are on a busy node, and that they keep nothing of what is over."""

import asyncio
import gc
import itertools
import statistics
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.pilot import Pilot

from phosd.tui.node import Node, Update
from phosd.tui.records import Image, Job, Record
from phosd.tui.widgets.table import RecordTable
from tests.tui.fakes import FEATURES, NOW, FakeLink, fake_node, gpu, image, job, process
from tests.tui.opened import LARGE, opened, run, until
from tests.tui.test_events import row

PROCESSES, IMAGES, EVENTS_A_SECOND = 500, 5000, 20
MEDIAN = 0.050
"""Seconds from a key to the painted screen."""
HOUR = 3600


def busy(processes: int, images: int) -> tuple[Node, FakeLink]:
    found: list[Record] = [gpu(number) for number in range(8)]
    found += [process(10_000 + number) for number in range(processes)]
    found += [image(f"20270114T{number:06}-aaaa", pid=number) for number in range(images)]
    return fake_node(*found, features=(*FEATURES, "events", "history-filters"))


def news() -> Iterator[Record]:
    """What happens on a busy node, without end: figures, jobs and images that come and go."""
    for number in itertools.count(1):
        pid = 10_000 + number % 40
        yield process(pid, device_bytes=number << 20, state=("running", "locked")[number % 2])
        yield gpu(number % 8, utilisation=number % 100 / 100, memory_used=number << 24)
        yield job(number, target=str(pid), progress=number % 100 / 100)
        yield job(number, target=str(pid), state="done", result=f"new-{number}")
        yield image(f"new-{number}", pid=pid, created=NOW + number)


@asynccontextmanager
async def happening(node: Node) -> AsyncIterator[None]:
    """These news, so many a second."""

    async def happen() -> None:
        for record in news():
            node.apply(Update({record.path: record}))
            await asyncio.sleep(1 / EVENTS_A_SECOND)

    task = asyncio.create_task(happen())
    try:
        yield
    finally:
        assert not task.done(), task.exception()
        task.cancel()


async def painted(pilot: Pilot[None], key: str) -> float:
    """Seconds from this key, which moves the cursor of the table, to the painted screen."""
    app, loop = pilot.app, asyncio.get_running_loop()
    table = app.screen.query_one(RecordTable)
    before, done = table.cursor, asyncio.Event()
    display = app._display

    def watched(*args: Any) -> None:
        display(*args)
        if table.cursor != before:
            done.set()

    pressed = events.Key(key, None)
    pressed.set_sender(app)
    app._display = watched  # type: ignore[assignment,method-assign]
    try:
        begun = loop.time()
        assert app._driver is not None
        app._driver.send_message(pressed)
        await asyncio.wait_for(done.wait(), 60)
        return loop.time() - begun
    finally:
        app._display = display  # type: ignore[method-assign]


@pytest.mark.parametrize("screen", ["1", "3"], ids=["processes", "images"])
def test_a_key_is_painted_at_once(screen: str) -> None:
    node, _ = busy(PROCESSES, IMAGES)

    async def body() -> None:
        async with opened(node, LARGE) as pilot:
            await pilot.press(screen)
            async with happening(node):
                taken = []
                for key in ["down"] * 30 + ["up"] * 20:
                    taken.append(await painted(pilot, key))
                    await asyncio.sleep(0.02)
        print(f"median {statistics.median(taken) * 1e3:.1f} ms, at most {max(taken) * 1e3:.1f} ms")
        assert statistics.median(taken) < MEDIAN, sorted(taken)

    run(body)


def used() -> tuple[int, int]:
    """Blocks of memory in use, and resident bytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return sys.getallocatedblocks(), pages * 4096


def test_an_hour_of_events_leaves_nothing_behind() -> None:
    """20 events a second; jobs and images come and go."""
    node, link = busy(40, 40)
    clock = [NOW]
    node.now = lambda: clock[0]
    happened = news()

    async def minutes(pilot: Pilot[None], count: int) -> None:
        for second in range(count * 60):
            clock[0] += 1
            batch = itertools.islice(happened, EVENTS_A_SECOND)
            records = {record.path: record for record in batch}
            ended = [*node.of(Job), *node.of(Image)][:-200]
            node.apply(Update(records, gone=frozenset(ended), noted=True))
            await pilot.pause(0)
            if second % 2:
                node.sample()
            if second % 20 == 0:
                number = int(clock[0] - NOW)
                link.answers["ListEvents"] = [row(n) for n in range(number, number - 1000, -1)]
                await pilot.press(str(second // 20 % 6 + 1))

    async def body() -> None:
        async with opened(node) as pilot:
            await minutes(pilot, 15)
            blocks, resident = used()
            await minutes(pilot, 45)
            blocks_after, resident_after = used()
            grown = blocks_after - blocks
            print(f"{blocks} blocks, {grown:+}; {(resident_after - resident) >> 10:+} KiB resident")
            assert grown < 0.05 * blocks
            assert resident_after - resident < 16 << 20
            await until(pilot, lambda: clock[0] == NOW + HOUR, "the hour")

    run(body)
