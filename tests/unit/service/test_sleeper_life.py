"""How a sleeper that was called waits for room on its GPU."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phosd.engine.node.gpus import GpuInfo
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy
from phosd.service.jobs.options import SleepRequest
from phosd.service.jobs.sleeper import Sleeper
from phosd.service.tasks import sleeper_life
from phosd.service.tasks.sleeper_life import Life, Means

GIB = 1 << 30
ME = ProcessId(4711, 1)
ENOUGH = 60.0


def waited(used: list[int | None], seconds: float, monkeypatch: pytest.MonkeyPatch) -> int:
    """Wait for room on GPU 0, whose memory is ``used`` so at each look. Returns how often it was
    looked at.
    """
    monkeypatch.setattr(sleeper_life, "_ROOM_SECONDS", 0.01)
    looks: list[int | None] = []

    def gpus() -> list[GpuInfo]:
        looks.append(used[min(len(looks), len(used) - 1)])
        other = GpuInfo(1, "GPU-1", "chip", 80 * GIB, memory_used=len(looks) * GIB)
        return [GpuInfo(0, "GPU-0", "chip", 80 * GIB, memory_used=looks[-1]), other]

    async def run(_: int, read: Callable[..., Any]) -> Any:
        if len(looks) == 1:  # no thread is to be had once
            looks.append(None)
            raise Busy("all threads are taken", hint="wait")
        return read()

    means = SimpleNamespace(engine=SimpleNamespace(gpus=gpus), query_pool=SimpleNamespace(run=run))
    request = SleepRequest(wake=True)
    sleeper = Sleeper(ME, 0, 0, request, "suspension", (ME,), (0,))

    async def body() -> None:
        async with asyncio.timeout(ENOUGH):
            await Life(sleeper, cast(Means, means), cast(Any, None)).await_room(seconds)

    asyncio.run(body())
    return len(looks)


def test_it_goes_on_when_there_is_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    full, noise = 79 * GIB, 79 * GIB - (1 << 20)
    assert waited([full, full, noise, full, 40 * GIB], 10 * ENOUGH, monkeypatch) == 5


@pytest.mark.parametrize("used", [[79 * GIB], [79 * GIB, 79 * GIB, 79 * GIB + 1], [None]])
def test_without_more_room_it_waits(
    used: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert waited(used, 0.1, monkeypatch) > 2
