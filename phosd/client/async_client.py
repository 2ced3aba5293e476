"""Use phosd from a program that has an event loop."""

import asyncio
import os
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self, TypeVar, Unpack

from phosd.bus import ROOT
from phosd.client.arguments import require
from phosd.client.checks import Check
from phosd.client.daemon import Daemon, News, touched
from phosd.client.evacuation import Step
from phosd.client.job_handle import AsyncJobHandle
from phosd.client.kernels import Kernel, kernel
from phosd.client.options import (
    CheckpointOptions,
    EventOptions,
    HistoryOptions,
    JobOptions,
    MigrateOptions,
    PoolOptions,
    RestoreOptions,
    ResumeOptions,
    SleepOptions,
    SuspendOptions,
    VerifyOptions,
)
from phosd.client.past import Event, event, past_job
from phosd.client.records import (
    Gpu,
    Image,
    Job,
    Manager,
    Pool,
    Process,
    Record,
    record_of,
    records_of,
)
from phosd.client.rows import read_pages
from phosd.client.storage import Storage
from phosd.client.typed_calls import in_microseconds, interface_of, typed_errors
from phosd.client.users import user_name
from phosd.errors import Internal, InvalidOption, PhosError
from phosd.interface.manager import MANAGER
from phosd.interface.methods import IMAGE, PROCESS
from phosd.interface.model import Interface

_SILENCE_SECONDS = 30.0
"""Seconds without a signal after which all is read: a bus that has too much to deliver loses
signals.
"""
_GONE = ("UnknownObject", "NotAuthorized")
"""Errors of reading an object that has ended, or that the caller may not read."""
_LISTS = ("ListProcesses", "ListImages", "ListGPUs")

_R = TypeVar("_R", bound=Record)


@dataclass(frozen=True)
class Change:
    """An object that was ``added``, ``changed`` or ``removed``. ``record`` is as it is now, or of a
    removed one as it was last.
    """

    kind: Literal["added", "changed", "removed"]
    record: Record


class AsyncClient:
    """A connection to phosd, made by :meth:`connect`. Use it on the event loop that opened it.

    Everything raises the errors of :mod:`phosd.errors`: each has a ``code`` (its class's name), the
    message, a ``hint`` what to do next, and where there is one a ``reason`` for programs.
    """

    def __init__(self, daemon: Daemon, bus: str) -> None:
        self._daemon = daemon
        self._bus = bus

    @classmethod
    async def connect(cls, bus: str | None = None, *, interactive: bool = False) -> Self:
        """Connect to phosd on ``system``, ``session`` or a D-Bus address; by default where
        ``PHOS_BUS`` says, or the system bus.

        ``interactive``: polkit may ask the user for a password. phosd itself need not run yet.
        Raises :class:`~phosd.errors.NoBus`.
        """
        if bus is not None:
            require("bus", bus, "s")
        where = bus or os.environ.get("PHOS_BUS") or "system"
        with typed_errors(where):
            return cls(await Daemon.open(where, interactive=interactive), where)

    async def close(self) -> None:
        """Disconnect. Jobs go on."""
        self._daemon.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # What there is

    async def manager(self) -> Manager:
        """Return phosd's version, its features, and its troubles (for administrators)."""
        return await self._one(Manager, ROOT)

    async def processes(self) -> list[Process]:
        """Return the GPU processes that you may see, by pid."""
        return sorted(await self._all(Process, "ListProcesses"), key=lambda each: each.pid)

    async def process(self, pid: int) -> Process:
        """Return one process. Raises :class:`~phosd.errors.NoSuchProcess`, or
        :class:`~phosd.errors.NotAuthorized` if it is another user's.
        """
        return await self._one(Process, await self._ask("GetProcess", pid))

    async def images(self) -> list[Image]:
        """Return the images that you may see, oldest first."""
        return sorted(await self._all(Image, "ListImages"), key=lambda each: each.id)

    async def image(self, image: str) -> Image:
        """Return one image. Raises :class:`~phosd.errors.NoSuchImage`, or
        :class:`~phosd.errors.NotAuthorized` if it is another user's.
        """
        return await self._one(Image, await self._ask("GetImage", image))

    async def jobs(self) -> list[Job]:
        """Return your jobs that run, wait, or ended lately, by number."""
        return sorted(await self._all(Job, "ListJobs"), key=lambda each: each.number)

    async def job(self, number: int) -> Job:
        """Return one job. Raises :class:`~phosd.errors.NoSuchJob`, or
        :class:`~phosd.errors.NotAuthorized` if it is another user's.
        """
        return await self._one(Job, await self._ask("GetJob", number))

    async def gpus(self) -> list[Gpu]:
        """Return the GPUs, by ordinal."""
        return sorted(await self._all(Gpu, "ListGPUs"), key=lambda each: each.ordinal)

    async def history(self, limit: int = 50, **options: Unpack[HistoryOptions]) -> list[Job]:
        """Return at most ``limit`` past jobs, newest first; options: :class:`HistoryOptions`."""
        require("limit", limit, "u")
        listed = partial(self._ask, "ListHistory")
        rows = await read_pages(listed, limit, **in_microseconds(options))
        return [past_job(row) for row in rows]

    async def events(self, **options: Unpack[EventOptions]) -> list[Event]:
        """Return what happened, newest first; options: :class:`EventOptions`."""
        rows = await self._ask("ListEvents", **in_microseconds(options))
        return [event(row) for row in rows]

    async def kernels(self, pid: int, limit: int = 500) -> list[Kernel]:
        """Return at most ``limit`` kernels that a process has launched, those launched most first,
        with what is known of each.
        """
        path = await self._ask("GetProcess", pid)
        rows = await self._call(path, PROCESS, "DescribeKernels", limit=limit)
        return [kernel(row) for row in rows]

    async def analyse_kernels(self, pid: int, count: int = 0) -> int:
        """Analyse the kernels of a process before others, and count what it launches for so many
        seconds; return how many are still to be analysed.
        """
        path = await self._ask("GetProcess", pid)
        return int(await self._call(path, PROCESS, "AnalyseKernels", count=count))

    async def doors(self, pid: int) -> list[str]:
        """Return where a process, and those below it, listen: ``127.0.0.1:8000``, say, or
        ``/run/chat.sock``.
        """
        path = await self._ask("GetProcess", pid)
        return [*await self._call(path, PROCESS, "ListDoors")]

    async def changes(self) -> AsyncGenerator[Change, None]:
        """Yield every object that you may see as ``added``, and then each change, until you stop.

        Raises :class:`~phosd.errors.NoDaemon` when phosd or the bus goes away; call it again then.
        """
        known: dict[str, Record] = {}
        with typed_errors(self._bus):
            async with self._daemon.news() as news:
                now: Mapping[str, Record | None] = await self._everything()
                while True:
                    for path, record in now.items():
                        change = _change(known.get(path), record)
                        if record is None:
                            known.pop(path, None)
                        else:
                            known[path] = record
                        if change is not None:
                            yield change
                    now = await self._news(news, known)

    # Work. Each returns as soon as phosd has taken the job.

    async def checkpoint(self, pid: int, **options: Unpack[CheckpointOptions]) -> "AsyncJobHandle":
        """Save a process and its children; the job's result is the id of the image. Options:
        :class:`CheckpointOptions`.
        """
        if options.get("every") == 0:
            raise InvalidOption("every=0 makes no checkpoint", hint="call end_periodic")
        return self._handle(await self._ask("Checkpoint", pid, **options))

    async def end_periodic(self, pid: int) -> None:
        """End the periodic checkpoints of a process; its images stay."""
        await self._ask("Checkpoint", pid, every=0.0)

    async def continue_(self, pid: int) -> None:
        """Let a process go on that a checkpoint with ``then="hold"`` holds."""
        await self._ask("Continue", pid)

    async def restore(self, image: str, **options: Unpack[RestoreOptions]) -> "AsyncJobHandle":
        """Run the program of an image again from where it was; the job's result is its pid.
        Options: :class:`RestoreOptions`.
        """
        return self._handle(await self._ask("Restore", image, **options))

    async def verify(self, image: str, **options: Unpack[VerifyOptions]) -> "AsyncJobHandle":
        """Read every byte of an image again. The job fails with
        :class:`~phosd.errors.ImageCorrupt` if one is wrong.
        """
        return self._handle(await self._ask("VerifyImage", image, **options))

    async def migrate(
        self, pid: int, destination: str, **options: Unpack[MigrateOptions]
    ) -> "AsyncJobHandle":
        """Move a process to another GPU: its number, the beginning of its UUID, or ``OLD:NEW`` for
        each of several, with commas. Options: :class:`MigrateOptions`.
        """
        return self._handle(await self._ask("Migrate", pid, destination, **options))

    async def suspend(self, pid: int, **options: Unpack[SleepOptions]) -> "AsyncJobHandle":
        """Take a process off its GPUs; it stands still until it is resumed. Options:
        :class:`SleepOptions`.
        """
        return self._handle(await self._ask("Suspend", pid, **options))

    async def resume(self, pid: int, **options: Unpack[ResumeOptions]) -> "AsyncJobHandle":
        """Bring a suspended process back. Options: :class:`ResumeOptions`."""
        return self._handle(await self._ask("Resume", pid, **options))

    async def swap(
        self, leaving: int, coming: int, **options: Unpack[SuspendOptions]
    ) -> "AsyncJobHandle":
        """Suspend a process, and resume another in its place. Options: :class:`SuspendOptions`."""
        return self._handle(await self._ask("Swap", leaving, coming, **options))

    async def create_pool(self, name: str, image: str, **options: Unpack[PoolOptions]) -> None:
        """Keep programs of an image ready. Options: :class:`PoolOptions`."""
        await self._ask("CreatePool", name, image, **options)

    async def scale_pool(self, name: str, **options: Unpack[PoolOptions]) -> None:
        """Change how many programs of a pool there are. Options: :class:`PoolOptions`."""
        await self._ask("ScalePool", name, **options)

    async def remove_pool(self, name: str) -> None:
        """End a pool, and its programs that were not started."""
        await self._ask("RemovePool", name)

    async def pools(self) -> list[Pool]:
        """Return the pools that you may see, by name."""
        return sorted(await self._all(Pool, "ListPools"), key=lambda each: each.name)

    async def start_pooled(self, name: str, **options: Unpack[JobOptions]) -> "AsyncJobHandle":
        """Start a program of a pool; the job's result is its pid. Options: :class:`JobOptions`."""
        return self._handle(await self._ask("StartPooled", name, **options))

    async def attach(self, number: int) -> "AsyncJobHandle":
        """Return the handle of a job that was started before, perhaps elsewhere. Raises
        :class:`~phosd.errors.NoSuchJob`.
        """
        return self._handle(await self._ask("GetJob", number))

    # At once

    async def delete(self, image: str) -> None:
        """Delete an image for good; returns when it is gone."""
        await self._ask("DeleteImage", image)

    async def note(self, image: str, text: str) -> None:
        """Write a note of an image, one line of at most 200 characters, in place of the one that it
        has; an empty one takes that away.
        """
        await self._call(await self._ask("GetImage", image), IMAGE, "SetNote", text)

    async def report_crashes(self, image: str, count: int) -> None:
        """Tell how often in a row the program has crashed soon after its restore from an image; 0:
        it goes on. Restores do not depend on it.
        """
        await self._call(await self._ask("GetImage", image), IMAGE, "ReportCrashes", count)

    async def make_pid_namespace(self, socket: str, *, end: str = "") -> int:
        """Make a pid namespace, and return the pid of its first process. That is of this user, and
        connects to the abstract unix ``socket``, to be told what to start, as ``phos run`` does
        it. It writes to the file ``end`` how that has ended.
        """
        return int(await self._ask("MakePidNamespace", socket, end=end))

    async def recover(self, pid: int) -> str:
        """Let a process run again that was left locked, checkpointed or parked; returns afterwards,
        with what was done.
        """
        return str(await self._ask("Recover", pid))

    async def try_checkpoint(self, pid: int, **options: Unpack[CheckpointOptions]) -> list[Check]:
        """Return what a checkpoint checks before it begins. Nothing is stopped or saved."""
        return [Check.of(*row) for row in await self._ask("TryCheckpoint", pid, **options)]

    async def try_restore(self, image: str, **options: Unpack[RestoreOptions]) -> list[Check]:
        """Return what a restore checks before it begins. Nothing is restored."""
        return [Check.of(*row) for row in await self._ask("TryRestore", image, **options)]

    async def storage(self) -> Storage:
        """Return how full the disk is that images are on, and what yours take of it."""
        return Storage(*await self._ask("GetStorage"))

    async def plan_evacuation(self, gpu: str) -> list[Step]:
        """Return what clears a GPU, by its number or the beginning of its UUID, of the processes
        that you may see. Nothing is done.
        """
        return [Step(*row) for row in await self._ask("PlanEvacuation", gpu)]

    # Calls by name

    async def _ask(self, member: str, /, *args: Any, **options: Any) -> Any:
        return await self._call(ROOT, MANAGER, member, *args, **options)

    async def _call(
        self, path: str, stated: Interface, member: str, /, *args: Any, **options: Any
    ) -> Any:
        with typed_errors(self._bus):
            return await self._daemon.ask(path, stated, member, *args, **options)

    # Reading records

    async def _one(self, kind: type[_R], path: str) -> _R:
        record = await self._read(path)
        if not isinstance(record, kind):
            raise Internal(f"{path} is no {kind.__name__}", hint="report this")
        return record

    async def _read(self, path: str) -> Record | None:
        with typed_errors(self._bus):
            values = await self._daemon.properties(path, "")
        return await asyncio.to_thread(record_of, path, interface_of(path), values, user_name)

    async def _all(self, kind: type[_R], *refresh: str) -> list[_R]:
        found = (await self._everything(*refresh)).values()
        return [record for record in found if isinstance(record, kind)]

    async def _everything(self, *refresh: str) -> dict[str, Record]:
        """Return all records by path, after the lists ``refresh`` (all, if none is named)."""
        with typed_errors(self._bus):
            managed = await self._daemon.managed(*(refresh or _LISTS))
        return await asyncio.to_thread(records_of, managed, user_name)

    async def _news(self, news: News, known: Mapping[str, Record]) -> dict[str, Record | None]:
        """Wait for signals, and return the records that they are about, None for what is gone."""
        try:
            async with asyncio.timeout(_SILENCE_SECONDS):
                paths = await touched(news)
        except TimeoutError:
            found = await self._everything()
            return {path: found.get(path) for path in (*known, *found)}
        return {path: await self._seen(path) for path in paths}

    async def _seen(self, path: str) -> Record | None:
        try:
            return await self._read(path)
        except PhosError as error:
            if error.code not in _GONE:
                raise
            return None

    def _handle(self, path: str) -> "AsyncJobHandle":
        return AsyncJobHandle(self._daemon, path, self._bus)


def _change(before: Record | None, now: Record | None) -> Change | None:
    if now is None:
        return None if before is None else Change("removed", before)
    if before is None:
        return Change("added", now)
    return None if now == before else Change("changed", now)
