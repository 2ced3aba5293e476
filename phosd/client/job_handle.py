"""Follow a job, wait for its end, or cancel it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import aclosing
from typing import Any

from phosd.client.arguments import require
from phosd.client.daemon import Daemon, Properties
from phosd.client.errors import told
from phosd.client.records import Job, record_of
from phosd.client.typed_calls import interface_of, typed_errors
from phosd.client.users import user_name
from phosd.errors import InvalidOption, Timeout
from phosd.interface.methods import JOB


class AsyncJobHandle:
    """A job that phosd has taken. ``await handle`` waits until it is done, as :meth:`wait` does."""

    def __init__(self, daemon: Daemon, path: str, bus: str) -> None:
        self._daemon = daemon
        self._bus = bus
        self.path = path
        """Its object on D-Bus."""
        self.number = int(path.rpartition("_")[2])

    async def follow(self) -> AsyncGenerator[Job, None]:
        """Yield the job at every change, at most twice a second, at last when it has ended. Raises
        :class:`~phosd.errors.NoDaemon` if phosd goes away before.
        """
        with typed_errors(self._bus):
            async with aclosing(self._daemon.follow(self.path)) as states:
                async for values in states:
                    yield await self._job(values)

    async def wait(
        self, progress: Callable[[Job], object] | None = None, timeout: float | None = None
    ) -> Job:
        """Wait until the job is done, and return it.

        ``progress`` is called at every change. Raises the error that ended the job (also
        :class:`~phosd.errors.Cancelled`), or :class:`~phosd.errors.Timeout` after ``timeout``
        seconds, when the job goes on.
        """
        require_wait(progress, timeout)
        job = None
        try:
            async with asyncio.timeout(timeout), aclosing(self.follow()) as states:
                async for job in states:
                    if progress is not None:
                        progress(job)
        except TimeoutError:
            raise late(self.number, timeout) from None
        return ended(job)

    def __await__(self) -> Generator[Any, None, Job]:
        return self.wait().__await__()

    async def cancel(self) -> None:
        """Stop the job at its next safe point; the program runs on."""
        with typed_errors(self._bus):
            await self._daemon.ask(self.path, JOB, "Cancel")

    async def _job(self, values: Properties) -> Job:
        interface = interface_of(self.path)
        record = await asyncio.to_thread(record_of, self.path, interface, values, user_name)
        assert isinstance(record, Job)
        return record


def require_wait(progress: object, timeout: object) -> None:
    """Raise :class:`InvalidOption` unless these can be arguments of a wait."""
    if progress is not None and not callable(progress):
        raise InvalidOption(
            f"progress cannot be called: {progress!r}",
            hint="give a function that takes a job, or timeout=SECONDS by its name",
        )
    if timeout is not None:
        require("timeout", timeout, "d")


def ended(job: Job | None) -> Job:
    """Return a job that is done; raise the error of one that is not."""
    assert job is not None
    if job.state != "done":
        message = job.message or f"job {job.number} is {job.state}"
        raise told(job.error or "Internal", message, job.hint, job.error_reason)
    return job


def late(number: int, seconds: float | None) -> Timeout:
    """Return the error for a job that has not ended in time."""
    return Timeout(f"job {number} has not ended within {seconds} s", hint="it goes on; wait again")
