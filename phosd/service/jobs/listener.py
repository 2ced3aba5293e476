"""Tell the event loop of jobs, at a limited rate of their progress."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from phosd.engine.job.progress import Progress
from phosd.service.jobs.job import Job

NOTIFY_SECONDS = 0.5
"""Least seconds between two progress notifications of one job."""


def _ignore(_: Job) -> None:
    pass


def _know_none(_: int, __: str) -> Job | None:
    return None


async def _go_on(_: Job) -> None:
    pass


@dataclass(frozen=True)
class Listener:
    """Callbacks of the table, always called on the event loop.

    ``moved`` reports a job that begins after waiting, or that has to wait again. ``concluding`` is
    awaited between the end of a job's work and the state that says so: whoever reads that state
    finds what the job has made. ``recall`` finds, by its user and token, one that was forgotten.
    """

    started: Callable[[Job], None] = _ignore
    moved: Callable[[Job], None] = _ignore
    progressed: Callable[[Job], None] = _ignore
    concluding: Callable[[Job], Awaitable[None]] = _go_on
    ended: Callable[[Job], None] = _ignore
    recall: Callable[[int, str], Job | None] = _know_none
    forgotten: Callable[[Job], None] = _ignore


class Notifier:
    """Forwards progress reports of a thread to the event loop at a limited rate."""

    def __init__(self, loop: asyncio.AbstractEventLoop, notify: Callable[[], None]) -> None:
        self._loop = loop
        self._notify = notify
        self._pending = False
        self._last = 0.0

    def __call__(self, progress: Progress) -> None:
        if not self._pending:
            self._pending = True
            self._loop.call_soon_threadsafe(self._schedule)

    def _schedule(self) -> None:
        wait = self._last + NOTIFY_SECONDS - self._loop.time()
        self._loop.call_later(max(0.0, wait), self._fire)

    def _fire(self) -> None:
        self._pending = False
        self._last = self._loop.time()
        self._notify()
