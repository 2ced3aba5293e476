"""Follow a job, wait for its end, or cancel it, without an event loop."""

from collections.abc import Callable, Iterator
from contextlib import closing

from phosd.client.job_handle import AsyncJobHandle, ended, late, require_wait
from phosd.client.loop import Loop
from phosd.client.records import Job


class JobHandle:
    """A job that phosd has taken."""

    def __init__(self, loop: Loop, handle: AsyncJobHandle) -> None:
        self._loop = loop
        self._handle = handle
        self.path = handle.path
        """Its object on D-Bus."""
        self.number = handle.number

    def follow(self) -> Iterator[Job]:
        """Yield the job at every change, as :meth:`AsyncJobHandle.follow` does."""
        return self._loop.each(self._handle.follow())

    def wait(
        self, progress: Callable[[Job], object] | None = None, timeout: float | None = None
    ) -> Job:
        """Wait until the job is done, and return it, as :meth:`AsyncJobHandle.wait` does."""
        require_wait(progress, timeout)
        job = None
        try:
            with closing(self._loop.each(self._handle.follow(), timeout)) as states:
                for job in states:
                    if progress is not None:
                        progress(job)
        except TimeoutError:
            raise late(self.number, timeout) from None
        return ended(job)

    def cancel(self) -> None:
        """Stop the job at its next safe point; the program runs on."""
        self._loop.run(self._handle.cancel())
