"""Keep the programs that sleep until somebody calls them."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from phosd.engine.image.called import Called
from phosd.engine.job.progress import Progress
from phosd.engine.program.doors import places_of
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, PhosError, Reason, Unsupported
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.history.events import Severity
from phosd.service.history.history import History
from phosd.service.jobs.engine import Programs
from phosd.service.jobs.options import ResumeRequest, SleepRequest
from phosd.service.jobs.sleeper import Sleeper
from phosd.service.jobs.table import Job, JobTable
from phosd.service.process_identity import Target
from phosd.service.tasks.sleeper_life import Known, Life, Means

MOST_SLEEPERS = 64
"""Sleepers of one user: each has descriptors in phosd."""
_LOOP_SECONDS = 30.0
"""Seconds that the event loop may take for what a job's thread asks of it."""
_log = logging.getLogger(__name__)


class Sleepers:
    """The sleepers of this node. ``write_down`` writes a job's journal record. Use it on the event
    loop only.
    """

    def __init__(
        self,
        engine: Programs,
        history: History,
        jobs: JobTable,
        write_down: Callable[[Job], None],
        query_pool: QueryPool,
        known: Callable[[], Known],
    ) -> None:
        self._means = Means(engine, history, jobs, write_down, query_pool, known)
        self._lives: dict[ProcessId, Life] = {}
        self._tasks: dict[ProcessId, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Go on with the sleepers of an earlier phosd, as their programs are now: that one may have
        been killed while it suspended or resumed one.
        """
        self._loop = asyncio.get_running_loop()
        for sleeper in self._means.history.sleepers.all():
            self._keep(await asyncio.to_thread(self._as_it_is, sleeper))

    async def close(self) -> None:
        """Wake nobody any more. The next phosd goes on."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def write_again(self) -> None:
        """Record all sleepers again in a new history file."""
        for life in self._lives.values():
            self._means.history.sleepers.record(life.sleeper)

    def of(self, process: ProcessId) -> Sleeper | None:
        """Return the sleeper that a process is of; None if it is of none."""
        found = (each.sleeper for each in self._lives.values())
        return next((s for s in found if process == s.process or process in s.users), None)

    async def require_room(self, target: Target) -> None:
        """Raise :class:`Unsupported` if nobody could call the program of a process, and
        :class:`Busy` if its user has as many sleepers as one may.
        """
        if not await self._means.query_pool.run(target.uid, places_of, target.id):
            raise Unsupported(
                f"nothing would wake process {target.pid}: it listens on no socket",
                hint="suspend it without `wake` and `idle`, and `phos resume` it",
                reason=Reason.NO_DOOR,
            )
        others = [life for process, life in self._lives.items() if process != target.id]
        if sum(each.sleeper.owner == target.uid for each in others) >= MOST_SLEEPERS:
            raise Busy(
                f"uid {target.uid} has {MOST_SLEEPERS} programs that are woken when they are "
                "called, as many as one may",
                hint="end or resume one (`phos ps`)",
            )

    # In a job's thread

    @contextlib.contextmanager
    def begun(
        self,
        target: Target,
        acting: int,
        request: SleepRequest,
        called: Called,
        progress: Progress,
    ) -> Iterator[str]:
        """Wake a program that is suspended inside when somebody calls it, instead of what was said
        of it before. ``acting`` is the user id whose rights count then. Yields where its memory is
        if it is suspended already, and hollow by now.
        """
        again = msgspec.structs.replace(request, thaw=False, token="", queue=False)
        sleeper = Sleeper(target.id, target.uid, acting, again, "", (), (), called)
        before: Life | None = self._on_loop(self._end, target.id)
        self._means.history.sleepers.record(sleeper)  # phosd may be killed from now on
        self._means.history.flush()
        try:
            found = self._means.suspended(target.id)
            if found is not None and not found.hollow:
                self._means.engine.resume(target.pid, ResumeRequest(hollow=True), acting, progress)
            yield found.where if found is not None else ""
        except BaseException:
            self._means.history.sleepers.forget(target.id)
            if before is not None:
                self._on_loop(self._keep, self._as_it_is(before.sleeper))
            raise
        self._on_loop(self._keep, self._as_it_is(sleeper))

    @contextlib.contextmanager
    def left_alone(self, process: ProcessId) -> Iterator[Sleeper | None]:
        """Wake a program no more, nor put it to sleep, unless what others do inside fails. Yields
        what it was until then, if it was a sleeper.
        """
        life: Life | None = self._on_loop(self._end, process)
        try:
            yield life.sleeper if life is not None else None
        except BaseException:
            if life is not None:
                self._on_loop(self._keep, self._as_it_is(life.sleeper))
            raise
        if life is not None:
            self._on_loop(self._forget, life)

    def _as_it_is(self, sleeper: Sleeper) -> Sleeper:
        """Return a sleeper as it is now: asleep or awake."""
        found = self._means.hollow(sleeper.process)
        return sleeper.asleep(found) if found is not None else sleeper.awake()

    def _on_loop(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """Do something on the event loop, and return what comes of it."""
        assert self._loop is not None

        async def done() -> Any:
            found = act(*arguments)
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result(_LOOP_SECONDS)

    # On the loop

    def _keep(self, sleeper: Sleeper) -> None:
        life = Life(sleeper, self._means, self._make_room)
        self._lives[sleeper.process] = life
        self._means.history.sleepers.record(sleeper)
        task = asyncio.get_running_loop().create_task(life.go_on())
        task.add_done_callback(partial(self._gone, life))
        self._tasks[sleeper.process] = task
        self._tell_changed(life)

    async def _end(self, process: ProcessId) -> Life | None:
        """End the life of a sleeper, and return it, if there is one."""
        life = self._lives.pop(process, None)
        if life is not None:
            life.over = True
            task = self._tasks.pop(process)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return life

    def _gone(self, life: Life, task: asyncio.Task[None]) -> None:
        """React to a life that has come to its end by itself."""
        process = life.sleeper.process
        if not task.cancelled() and self._lives.get(process) is life:
            del self._lives[process], self._tasks[process]
            self._forget(life)

    def _forget(self, life: Life) -> None:
        life.over = True
        process = life.sleeper.process
        self._means.history.sleepers.forget(process)
        expected = not life.sleeper.idle and not life.sleeper.suspension  # it was woken, once
        if not expected and procfs.process_id(process.pid) == process:
            text = "a call does not wake it any more: somebody has resumed or suspended it"
            rests = any(process in each.roots for each in self._means.engine.suspended())
            life.tell(text, Severity.WARNING if rests else Severity.INFO)
        self._tell_changed(life)

    def _tell_changed(self, life: Life) -> None:
        for process in {life.sleeper.process, *life.sleeper.users}:
            self._means.known().renew(process.pid)

    async def _make_room(self, coming: Life, *, first: bool) -> bool:
        """Put a program to sleep that has nothing to do on the GPUs of the one that comes: the one
        that has had nothing to do for longest. Returns whether there may be room now. ``first``:
        only if there seems to be none.
        """
        if first and await self._would_fit(coming, []):
            return True
        there = [each for each in self._lives.values() if each.gpus & coming.gpus]
        quiet = [each for each in there if each is not coming and await each.is_quiet()]
        if not quiet or not await self._would_fit(coming, quiet):
            return False
        for each in sorted(quiet, key=lambda each: each.quiet_since):
            try:
                await each.put_to_sleep("a program was called that needs its GPU")
                return True
            except PhosError as error:
                _log.info("process %d keeps its GPU: %s", each.pid, error)
        return False

    async def _would_fit(self, coming: Life, leaving: list[Life]) -> bool:
        """Whether there might be room for what comes if all these left."""
        found = await coming.read(self._means.hollow, coming.sleeper.process)
        room = {
            gpu.ordinal: gpu.memory_total - gpu.memory_used
            for gpu in await coming.read(self._means.engine.gpus)
            if gpu.memory_used is not None
        }
        for process in (process for each in leaving for process in each.tree):
            for gpu in room.keys() & {*process.gpus}:
                room[gpu] += process.device_bytes
        contexts = self._means.engine.context_bytes() * len(coming.sleeper.users)  # they are there
        needs = found.device_bytes.items() if found is not None else ()
        return all(size - contexts <= room.get(gpu, size) for gpu, size in needs)
