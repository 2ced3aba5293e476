"""Use phosd from a program that has no event loop."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import closing
from typing import Any, Generic, Self, TypeVar, Unpack

from phosd.client.async_client import AsyncClient, Change
from phosd.client.checks import Check
from phosd.client.evacuation import Step
from phosd.client.job_handle import AsyncJobHandle, ended, late
from phosd.client.kernels import Kernel
from phosd.client.options import (
    CheckpointOptions,
    EventOptions,
    HistoryOptions,
    MigrateOptions,
    RestoreOptions,
    ResumeOptions,
    SuspendOptions,
    VerifyOptions,
)
from phosd.client.past import Event
from phosd.client.records import Gpu, Image, Job, Manager, Process

_T = TypeVar("_T")


class _Loop:
    """An event loop in a thread of its own, which runs until :meth:`close`."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="phos-client", daemon=True
        )
        self._thread.start()
        self.closed = False
        """Whether :meth:`close` was called."""

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run it to its end; an exception here, such as an interrupt, ends it. Raises
        :class:`RuntimeError` if the client is closed.
        """
        if self.closed:
            work.close()
            raise RuntimeError("this client is closed; make another one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

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
        """End the thread. Nothing may be given to it from now on: it would never be done."""
        self.closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


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


class Client:
    """A connection to phosd. It may be used by several threads.

    Everything raises the errors of :mod:`phosd.errors`: each has a ``code`` (its class's name), the
    message, a ``hint`` what to do next, and where there is one a ``reason`` for programs.

        with Client() as client:
            image = client.checkpoint(4711).wait().result
    """

    def __init__(self, bus: str | None = None, *, interactive: bool = False) -> None:
        """Connect to phosd, as :meth:`AsyncClient.connect` does."""
        self._loop = _Loop()
        try:
            self._client = self._loop.run(AsyncClient.connect(bus, interactive=interactive))
        except BaseException:
            self._loop.close()
            raise

    def close(self) -> None:
        """Disconnect. Jobs go on."""
        if not self._loop.closed:
            self._loop.run(self._client.close())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What there is

    def manager(self) -> Manager:
        """Return phosd's version, its features, and its troubles (for administrators)."""
        return self._loop.run(self._client.manager())

    def processes(self) -> list[Process]:
        """Return the GPU processes that you may see, by pid."""
        return self._loop.run(self._client.processes())

    def process(self, pid: int) -> Process:
        """Return one process, as :meth:`AsyncClient.process` does."""
        return self._loop.run(self._client.process(pid))

    def images(self) -> list[Image]:
        """Return the images that you may see, oldest first."""
        return self._loop.run(self._client.images())

    def image(self, image: str) -> Image:
        """Return one image, as :meth:`AsyncClient.image` does."""
        return self._loop.run(self._client.image(image))

    def jobs(self) -> list[Job]:
        """Return your jobs that run, wait, or ended lately, by number."""
        return self._loop.run(self._client.jobs())

    def job(self, number: int) -> Job:
        """Return one job, as :meth:`AsyncClient.job` does."""
        return self._loop.run(self._client.job(number))

    def gpus(self) -> list[Gpu]:
        """Return the GPUs, by ordinal."""
        return self._loop.run(self._client.gpus())

    def history(self, limit: int = 50, **options: Unpack[HistoryOptions]) -> list[Job]:
        """Return past jobs, as :meth:`AsyncClient.history` does."""
        return self._loop.run(self._client.history(limit, **options))

    def events(self, **options: Unpack[EventOptions]) -> list[Event]:
        """Return what happened, as :meth:`AsyncClient.events` does."""
        return self._loop.run(self._client.events(**options))

    def kernels(self, pid: int, limit: int = 500) -> list[Kernel]:
        """Return what is known of a process's kernels, as :meth:`AsyncClient.kernels` does."""
        return self._loop.run(self._client.kernels(pid, limit))

    def analyse_kernels(self, pid: int, count: int = 0) -> int:
        """Have them analysed before others, as :meth:`AsyncClient.analyse_kernels` does."""
        return self._loop.run(self._client.analyse_kernels(pid, count))

    def changes(self) -> Iterator[Change]:
        """Yield what there is, and then each change, as :meth:`AsyncClient.changes` does."""
        return self._loop.each(self._client.changes())

    # Work. Each returns as soon as phosd has taken the job.

    def checkpoint(self, pid: int, **options: Unpack[CheckpointOptions]) -> "JobHandle":
        """Save a process, as :meth:`AsyncClient.checkpoint` does."""
        return self._begun(self._client.checkpoint(pid, **options))

    def end_periodic(self, pid: int) -> None:
        """End the periodic checkpoints of a process; its images stay."""
        self._loop.run(self._client.end_periodic(pid))

    def continue_(self, pid: int) -> None:
        """Let a process go on that a checkpoint with ``then="hold"`` holds."""
        self._loop.run(self._client.continue_(pid))

    def restore(self, image: str, **options: Unpack[RestoreOptions]) -> "JobHandle":
        """Run the program of an image again, as :meth:`AsyncClient.restore` does."""
        return self._begun(self._client.restore(image, **options))

    def verify(self, image: str, **options: Unpack[VerifyOptions]) -> "JobHandle":
        """Read every byte of an image again, as :meth:`AsyncClient.verify` does."""
        return self._begun(self._client.verify(image, **options))

    def migrate(self, pid: int, destination: str, **options: Unpack[MigrateOptions]) -> "JobHandle":
        """Move a process to another GPU, as :meth:`AsyncClient.migrate` does."""
        return self._begun(self._client.migrate(pid, destination, **options))

    def suspend(self, pid: int, **options: Unpack[SuspendOptions]) -> "JobHandle":
        """Take a process off its GPUs, as :meth:`AsyncClient.suspend` does."""
        return self._begun(self._client.suspend(pid, **options))

    def resume(self, pid: int, **options: Unpack[ResumeOptions]) -> "JobHandle":
        """Bring a suspended process back, as :meth:`AsyncClient.resume` does."""
        return self._begun(self._client.resume(pid, **options))

    def swap(self, leaving: int, coming: int, **options: Unpack[SuspendOptions]) -> "JobHandle":
        """Have two processes take turns, as :meth:`AsyncClient.swap` does."""
        return self._begun(self._client.swap(leaving, coming, **options))

    def attach(self, number: int) -> "JobHandle":
        """Return the handle of an earlier job, as :meth:`AsyncClient.attach` does."""
        return self._begun(self._client.attach(number))

    # At once

    def delete(self, image: str) -> None:
        """Delete an image for good; returns when it is gone."""
        self._loop.run(self._client.delete(image))

    def note(self, image: str, text: str) -> None:
        """Write a note of an image, as :meth:`AsyncClient.note` does."""
        self._loop.run(self._client.note(image, text))

    def make_pid_namespace(self, socket: str, *, end: str = "") -> int:
        """Have a pid namespace made, as :meth:`AsyncClient.make_pid_namespace` does."""
        return self._loop.run(self._client.make_pid_namespace(socket, end=end))

    def recover(self, pid: int) -> str:
        """Let a process run again, as :meth:`AsyncClient.recover` does."""
        return self._loop.run(self._client.recover(pid))

    def try_checkpoint(self, pid: int, **options: Unpack[CheckpointOptions]) -> list[Check]:
        """Return what a checkpoint checks, as :meth:`AsyncClient.try_checkpoint` does."""
        return self._loop.run(self._client.try_checkpoint(pid, **options))

    def try_restore(self, image: str, **options: Unpack[RestoreOptions]) -> list[Check]:
        """Return what a restore checks, as :meth:`AsyncClient.try_restore` does."""
        return self._loop.run(self._client.try_restore(image, **options))

    def plan_evacuation(self, gpu: str) -> list[Step]:
        """Return what clears a GPU, as :meth:`AsyncClient.plan_evacuation` does."""
        return self._loop.run(self._client.plan_evacuation(gpu))

    def _begun(self, call: Coroutine[Any, Any, AsyncJobHandle]) -> "JobHandle":
        return JobHandle(self._loop, self._loop.run(call))


class JobHandle:
    """A job that phosd has taken."""

    def __init__(self, loop: _Loop, handle: AsyncJobHandle) -> None:
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
        """Have the job stop at its next safe point; the program runs on."""
        self._loop.run(self._handle.cancel())
