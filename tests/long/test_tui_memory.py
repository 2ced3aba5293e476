"""The screens keep nothing of what is over."""

import gc
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.pilot import Pilot

from phosd.client.records import Image, Job, Record
from phosd.tui.node import Update
from tests.support.rotation import times
from tests.support.tui.fakes import FEATURES, NOW, fake_node, gpu, image, job, process
from tests.support.tui.opened import opened, run
from tests.unit.tui.test_events import row

THINGS, EVENTS_A_SECOND = 40, 20
MINUTES = times(16, everything=16, soak=60)
"""How long the screens are open, of which a quarter is for caches to fill up."""


def news() -> Iterator[Record]:
    """What happens on a busy node, without end: figures, jobs and images that come and go."""
    for number in itertools.count(1):
        pid = 10_000 + number % THINGS
        yield process(pid, device_bytes=number << 20, state=("running", "locked")[number % 2])
        yield gpu(number % 8, utilisation=number % 100 / 100, memory_used=number << 24)
        yield job(number, target=str(pid), progress=number % 100 / 100)
        yield job(number, target=str(pid), state="done", result=f"new-{number}")
        yield image(f"new-{number}", pid=pid, created=NOW + number)


def used() -> tuple[int, int]:
    """Blocks of memory in use, and resident bytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return sys.getallocatedblocks(), pages * 4096


@pytest.mark.rotated(of=4)
@pytest.mark.timeout(500)
def test_events_leave_nothing_behind() -> None:
    """20 events a second; jobs and images come and go."""
    node, link = fake_node(
        *(gpu(number) for number in range(8)),
        *(process(10_000 + number) for number in range(THINGS)),
        features=(*FEATURES, "events"),
    )
    clock = [NOW]
    node.now = lambda: clock[0]
    happened = news()

    async def minutes(pilot: Pilot[None], count: int) -> None:
        for second in range(count * 60):
            clock[0] += 1
            batch = itertools.islice(happened, EVENTS_A_SECOND)
            records = {record.path: record for record in batch}
            ended = [*list(node.of(Job))[:-100], *list(node.of(Image))[:-100]]
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
            await minutes(pilot, MINUTES // 4)
            blocks, resident = used()
            await minutes(pilot, MINUTES - MINUTES // 4)
            blocks_after, resident_after = used()
            grown = blocks_after - blocks
            print(f"{blocks} blocks, {grown:+}; {(resident_after - resident) >> 10:+} KiB resident")
            assert grown < 0.05 * blocks
            assert resident_after - resident < 16 << 20
            assert clock[0] == NOW + 60 * MINUTES

    run(body)
