"""Run long reads, and requests to other programs, in a pool of threads."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from phosd.engine.job.cancellation import Cancellation

_THREADS = 8
_PER_USER = 2

_T = TypeVar("_T")
_P = ParamSpec("_P")


class QueryPool:
    """A pool of threads in which each user has a limited share. Use it on the event loop only.

    A read goes on when its caller leaves the bus, and still counts towards the user's share, so
    that reconnecting does not give anyone more. One that waits for its caller ends when ``over``
    says so: phosd does not end before it.
    """

    def __init__(self) -> None:
        self.over = Cancellation()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="reader")
        self._shares: defaultdict[int, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_PER_USER)
        )
        self._tasks: set[asyncio.Task[Any]] = set()

    async def run(
        self, user: int, read: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Call ``read`` in a thread for a user id; return or raise its result."""
        task = asyncio.get_running_loop().create_task(
            self._run(self._shares[user], partial(read, *args, **kwargs))
        )
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    async def _run(self, share: asyncio.Semaphore, read: Callable[[], _T]) -> _T:
        async with share:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # mark as retrieved; the caller, if still there, gets it too

    def close(self) -> None:
        """Cancel all reads."""
        self.over.cancel()
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
