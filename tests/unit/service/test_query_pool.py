"""Nobody's slow reads keep the threads from others."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from phosd.service.dbus.query_pool import QueryPool

PATIENCE = 30.0


@asynccontextmanager
async def query_pool() -> AsyncIterator[QueryPool]:
    made = QueryPool()
    yield made
    made.close()


def test_values_and_errors_come_back() -> None:
    async def run() -> None:
        async with query_pool() as threads:
            assert await threads.run(1, divmod, 7, 2) == (3, 1)
            with pytest.raises(ZeroDivisionError):
                await threads.run(1, divmod, 7, 0)

    asyncio.run(run())


def test_one_user_does_not_take_all_threads() -> None:
    """Also not one who goes away and comes back: what they began still runs."""

    async def run() -> None:
        go, at_work = threading.Event(), threading.Semaphore(0)
        begun: list[int] = []

        def slow(number: int) -> None:
            begun.append(number)
            at_work.release()
            go.wait(PATIENCE)

        async with query_pool() as threads:
            waiting = []
            for number in range(20):
                call = asyncio.create_task(threads.run(1, slow, number))
                await asyncio.sleep(0)
                waiting.append(call)
                if number % 2:
                    call.cancel()
            await asyncio.to_thread(at_work.acquire)
            await asyncio.to_thread(at_work.acquire)
            assert await asyncio.wait_for(threads.run(2, divmod, 7, 2), PATIENCE) == (3, 1)
            assert sorted(begun) == [0, 1]  # each in a thread of its own
            go.set()
            for call in waiting:
                with suppress(asyncio.CancelledError):
                    await call
            await asyncio.wait_for(threads.run(1, divmod, 7, 2), PATIENCE)
            for _ in range(2, 20):
                assert await asyncio.to_thread(at_work.acquire, timeout=PATIENCE)
            assert sorted(begun) == list(range(20))

    asyncio.run(run())


def test_what_waits_at_the_end_is_dropped() -> None:
    async def run() -> None:
        go = threading.Event()
        async with query_pool() as threads:
            calls = [asyncio.create_task(threads.run(1, go.wait, PATIENCE)) for _ in range(5)]
            await asyncio.sleep(0)
        done, left = await asyncio.wait(calls, timeout=PATIENCE)
        go.set()
        assert not left
        assert all(call.cancelled() for call in done)

    asyncio.run(run())
