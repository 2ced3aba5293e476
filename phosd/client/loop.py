"""Run coroutines for threads that have no event loop."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_END_SECONDS = 2.0


class Loop:
    """An event loop in a thread of its own, which runs until :meth:`close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="phos-client", daemon=True
        )
        self._thread.start()
        self._process = os.getpid()
        self.closed = False
        """Whether :meth:`close` was called."""

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run it to its end; an exception here, such as an interrupt, ends it. Raises
        :class:`RuntimeError` if the client is closed, or was made before a fork: the thread is the
        parent's.
        """
        if self.closed or not self.is_here:
            work.close()
            why = "is closed" if self.closed else "was made before a fork"
            raise RuntimeError(f"this client {why}; make another one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    @property
    def is_here(self) -> bool:
        """Whether the thread is one of this process."""
        return os.getpid() == self._process

    def each(
        self, items: AsyncGenerator[_T, None], timeout: float | None = None
    ) -> Generator[_T, None, None]:
        """Yield what ``items`` yields. Raises :class:`TimeoutError` after ``timeout`` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        pull = _Pull(items)
        try:
            while (item := self.run(pull.next(end))) is not None:
                yield item
        finally:
            if not self.closed:
                self.run(pull.close())

    def close(self) -> None:
        """End the thread, and what still runs in it: an interrupt leaves that behind. Nothing may
        be given to it from now on: it would never be done.
        """
        self.closed = True
        if not self.is_here:
            return
        asyncio.run_coroutine_threadsafe(_end_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _end_others() -> None:
    """Cancel all other tasks of the loop, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=_END_SECONDS)


class _Pull(Generic[_T]):
    """Takes items of an asynchronous generator, one after the other, for another thread, which may
    be interrupted at any point.
    """

    def __init__(self, items: AsyncGenerator[_T, None]) -> None:
        self._items = items
        self._pulling: asyncio.Task[Any] | None = None

    async def next(self, end: float | None) -> _T | None:
        """Return the next item before the time ``end`` of the monotonic clock; None at their
        end.
        """
        self._pulling = asyncio.current_task()
        async with asyncio.timeout(None if end is None else max(0.0, end - time.monotonic())):
            return await anext(self._items, None)

    async def close(self) -> None:
        """Close the generator. It may still run, for a thread that was interrupted and waits for
        it no more: until it has stopped, it cannot be closed.
        """
        if self._pulling is not None and not self._pulling.done():
            self._pulling.cancel()
            await asyncio.wait((self._pulling,))
        await self._items.aclose()
