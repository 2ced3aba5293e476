"""Live the life of one sleeper: wake it when somebody calls it, and put it to sleep when it has
nothing to do.

A program that sleeps is hollow: frozen, with its contexts on its GPUs. A call is seen from outside
(:mod:`phosd.service.tasks.calls`), and the program takes it itself when it runs again.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from phosd.engine.job.progress import Progress
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.node.suspended import Suspended
from phosd.engine.program.doors import is_answering
from phosd.engine.program.process import GpuProcess
from phosd.engine.system import procfs
from phosd.engine.system.freezer import with_those_below
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, Cancelled, NoSuchProcess, OutOfMemory, PhosError, Timeout
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.history.events import Event, Severity
from phosd.service.history.history import History
from phosd.service.jobs.engine import Programs
from phosd.service.jobs.options import ResumeRequest
from phosd.service.jobs.sleeper import Sleeper
from phosd.service.jobs.table import Job, JobTable, Outcome, Task
from phosd.service.process_identity import key_of
from phosd.service.tasks.calls import Call, await_call
from phosd.service.tasks.checkpoints import claim_of

_SHORTEST, _LONGEST = 0.25, 15.0
"""Seconds between two looks whether a program has computed."""
_COUNTED = 2 * _LONGEST + 1
"""Seconds for which launches are counted after a look."""
_TURN_SECONDS = 1.0
"""Seconds that a program must have been quiet before another one may take its place."""
_TRIES = 8
"""Programs that leave for one, at most."""
_IN_VAIN, _VAIN_SECONDS = 3, 5.0
"""How often in a row a program is woken that launches nothing, before it sleeps so long at least
although somebody seems to call.
"""
_ROOM_SECONDS, _MORE = 1.0, 64 << 20
"""Between two looks whether there is room now, and how many more bytes that takes."""
FIRST_DELAY, MOST_DELAY = 2.0, 300.0
"""Seconds until something is tried again after a failure; they double with each."""
_log = logging.getLogger(__name__)


class Known(Protocol):
    """What is known of the node's processes."""

    def tree(self, pid: int) -> list[GpuProcess]:
        """Return the GPU processes of the last scan that are this one or below it."""

    def renew(self, pid: int) -> None:
        """Tell what has changed of a process."""


@dataclass(frozen=True)
class Means:
    """What each of them needs. ``write_down`` writes a job's journal record."""

    engine: Programs
    history: History
    jobs: JobTable
    write_down: Callable[[Job], None]
    query_pool: QueryPool
    known: Callable[[], Known]

    def hollow(self, process: ProcessId) -> Suspended | None:
        """Return the suspension of the program that has a process, if it is hollow."""
        found = self.suspended(process)
        return found if found is not None and found.hollow else None

    def suspended(self, process: ProcessId) -> Suspended | None:
        """Return the suspension of the program that has a process."""
        found = (each for each in self.engine.suspended() if process in each.roots)
        return next(found, None)


class MakeRoom(Protocol):
    """Puts another program to sleep for one that comes, ``first`` only if it has to. Returns
    whether there may be room now.
    """

    async def __call__(self, coming: "Life", *, first: bool) -> bool: ...


class Life:
    """The life of a ``sleeper``. ``make_room`` is called when its GPUs have none, and returns
    whether it has made some. Use it on the event loop only.
    """

    def __init__(self, sleeper: Sleeper, means: Means, make_room: "MakeRoom") -> None:
        self.sleeper = sleeper
        self.quiet_since = math.inf
        """When it was last seen to have launched a kernel, on the loop's clock."""
        self.over = False
        """Whether it is none any more."""
        self._means = means
        self._make_room = make_room
        self._launched = 0
        """How many kernels it had launched when it was last looked at."""
        self._vain = 0
        """How often in a row it was woken and launched none."""
        self._told = ""
        """The last trouble that was told, until something succeeds."""
        self._turning = asyncio.Lock()
        """Held while it falls asleep or wakes."""
        self._turned = asyncio.Event()
        """Set when it was put to sleep for another one's sake."""

    @property
    def pid(self) -> int:
        return self.sleeper.process.pid

    @property
    def gpus(self) -> set[int]:
        """The GPUs that it uses now, or used when it fell asleep."""
        if self.sleeper.suspension:
            return {*self.sleeper.gpus}
        return {gpu for each in self.tree for gpu in each.gpus}

    @property
    def tree(self) -> list[GpuProcess]:
        """Its GPU processes as of the last scan."""
        return self._means.known().tree(self.pid)

    async def go_on(self) -> None:
        """Wake the program and let it fall asleep, until it has ended, or somebody else resumes or
        suspends it. What fails is told, and tried again.
        """
        delay = FIRST_DELAY
        while True:
            try:
                if not await self._is_as_left() or not await self._turn():
                    return
                delay, self._told = FIRST_DELAY, ""
                continue
            except Cancelled as error:
                _log.info("%s", error)
            except OutOfMemory as error:
                self._tell_once(str(error))
                await self.await_room(delay)
                delay = min(2 * delay, MOST_DELAY)
                continue
            except PhosError as error:
                self._tell_once(str(error))
            except Exception as error:
                _log.exception("process %d is not woken now", self.pid)
                self.tell(f"it is not woken now ({error!r}); phosd's log has the details")
            await asyncio.sleep(delay)
            delay = min(2 * delay, MOST_DELAY)

    async def await_room(self, seconds: float) -> None:
        """Wait for so long, or until one of its GPUs has clearly more memory free than now."""
        loop = asyncio.get_running_loop()
        until, before = loop.time() + seconds, await self._free()
        while (left := until - loop.time()) > 0:
            await asyncio.sleep(min(_ROOM_SECONDS, left))
            now = await self._free()
            if any(now.get(gpu, 0) - free >= _MORE for gpu, free in before.items()):
                return

    async def _free(self) -> dict[int, int]:
        """Return the bytes that its GPUs have free, as far as these tell."""
        found: list[GpuInfo] = []
        with contextlib.suppress(PhosError):  # a thread is to be had at the next look
            found = await self.read(self._means.engine.gpus)
        return {
            gpu.ordinal: gpu.memory_total - gpu.memory_used
            for gpu in found
            if gpu.ordinal in self.sleeper.gpus and gpu.memory_used is not None
        }

    async def _turn(self) -> bool:
        """Wake the program once it is called, or put it to sleep once it is idle. Returns False if
        it is to stay awake.
        """
        sleeper = self.sleeper
        if sleeper.suspension:
            processes = {sleeper.process, *sleeper.users}
            call = await await_call(processes, self.read, self._is_as_left)
            if call is Call.BEFORE and self._vain > _IN_VAIN:  # it may be what it does not read
                await asyncio.sleep(_VAIN_SECONDS)
            if call is not Call.NONE:
                await self._wake()
            return True
        if not sleeper.idle:
            return False
        if await self._is_idle():
            await self.put_to_sleep("it has computed nothing for a while")
        return True

    async def _is_as_left(self) -> bool:
        async with self._turning:
            return bool(await self.read(self._looks_as_left))

    def _looks_as_left(self) -> bool:
        """Return whether the program lives, and is asleep or awake as is known of it. One that is
        not hollow any more is not frozen either, and may take a call that it cannot answer.
        """
        sleeper = self.sleeper
        if procfs.process_id(self.pid) != sleeper.process:
            return False
        found = self._means.suspended(sleeper.process)
        if found is None:
            return not sleeper.suspension
        return found.hollow and found.image == sleeper.suspension

    async def read(self, read: Callable[..., Any], *arguments: Any) -> Any:
        """Read something in a thread, of which each user has a share."""
        return await self._means.query_pool.run(self.sleeper.owner, read, *arguments)

    # Asleep

    async def _wake(self) -> None:
        async with self._turning:
            tries = _TRIES
            if self.sleeper.idle:  # without a job that fails
                await self._make_room(self, first=True)
            while True:
                try:
                    await self._resume()
                    return
                except OutOfMemory:
                    tries -= 1
                    if not tries or not self.sleeper.idle:
                        raise
                    if not await self._make_room(self, first=False):
                        raise

    async def _resume(self) -> None:
        sleeper, engine = self.sleeper, self._means.engine

        def work(progress: Progress) -> Outcome:
            self._require_as_left()
            progress.note("somebody called it")
            moved = engine.resume(self.pid, ResumeRequest(), sleeper.acting, progress)
            self._became(sleeper.awake())
            with contextlib.suppress(PhosError):  # it has ended: the next look says so
                self._launches(sleeper.users)  # what it launches for this call counts
            return Outcome(",".join(f"{old}:{new}" for old, new in sorted(moved.items())))

        await self._do("resume", work)

    # Awake

    async def _is_idle(self) -> bool:
        """Wait until the program has computed nothing for as long as it says; False: it is not as
        it was left, or sleeps.
        """
        loop = asyncio.get_running_loop()
        period = min(max(self.sleeper.idle / 4, _SHORTEST), _LONGEST)
        self.quiet_since, self._vain = loop.time(), self._vain + 1
        self._turned.clear()
        while True:
            # A job that works on it may hide what it does: until that has ended it is not idle.
            with contextlib.suppress(Busy, Timeout):
                launched = await self.read(self._launches, self._users())
                if launched not in (0, self._launched):  # a checkpoint counts anew
                    self.quiet_since, self._vain = loop.time(), 0
                if await self.read(self._answers):
                    self.quiet_since = loop.time()
                self._launched = launched
                if loop.time() - self.quiet_since >= self.sleeper.idle:
                    return True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period):
                    await self._turned.wait()
            if self.sleeper.suspension or not await self._is_as_left():
                return False

    async def is_quiet(self) -> bool:
        """Whether it falls asleep by itself, and has nothing to do for a while already."""
        quiet = asyncio.get_running_loop().time() - self.quiet_since
        if self.sleeper.suspension or not self.sleeper.idle or quiet < _TURN_SECONDS:
            return False
        try:
            launched = await self.read(self._launches, self._users())
            return launched in (0, self._launched) and not await self.read(self._answers)
        except PhosError:
            return False

    async def put_to_sleep(self, why: str) -> None:
        """Suspend the program until somebody calls it, if it still computes nothing."""
        async with self._turning:
            sleeper, means, users = self.sleeper, self._means, self._users()
            if sleeper.suspension or self.over:
                return

            def work(progress: Progress) -> Outcome:
                self._require_as_left()
                if self._launches(users) not in (0, self._launched) or self._answers():
                    raise Cancelled(f"process {self.pid} computes again")
                progress.note(why)
                request = sleeper.request.each
                where = means.engine.suspend(self.pid, request, sleeper.acting, progress)
                if (found := means.hollow(sleeper.process)) is not None:
                    self._became(sleeper.asleep(found))
                return Outcome(where, where)

            await self._do("suspend", work)
            self._turned.set()

    def _users(self) -> tuple[ProcessId, ...]:
        """Return its GPU processes, with those that it has begun since it woke."""
        return (*{*self.sleeper.users, *(each.id for each in self.tree)},)

    def _launches(self, users: Sequence[ProcessId]) -> int:
        """Return how many kernels processes have launched since they are counted."""
        total = 0
        for process in users:
            if procfs.process_id(process.pid) == process:
                with contextlib.suppress(NoSuchProcess):
                    total += self._means.engine.launch_count(process, math.ceil(_COUNTED))
        return total

    def _answers(self) -> bool:
        """Return whether it works on the answer to what it has read, for whatever it takes to."""
        return is_answering(with_those_below([self.sleeper.process, *self.sleeper.users]))

    # Both

    async def _do(self, operation: str, work: Callable[[Progress], Outcome]) -> None:
        sleeper, jobs = self.sleeper, self._means.jobs
        task = Task(
            *(operation, str(self.pid), sleeper.owner, frozenset((claim_of(self.pid),)), work),
            queue=True,
            process=key_of(self.pid),
            gpus=frozenset(sleeper.gpus),
            called=sleeper.called,
        )
        job = jobs.submit(task, self._means.write_down)
        try:
            await jobs.result(job)
        except asyncio.CancelledError:
            jobs.cancel(job)
            raise

    def _require_as_left(self) -> None:
        """Raise :class:`Cancelled` if others have done something to it meanwhile."""
        if self.over or not self._looks_as_left():
            raise Cancelled(f"process {self.pid} was resumed or suspended by somebody else")

    def _became(self, sleeper: Sleeper) -> None:
        """Note what has become of it, in a job's thread."""
        self.sleeper = sleeper
        if not self.over:
            self._means.history.sleepers.record(sleeper)

    def _tell_once(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self.tell(text)

    def tell(self, text: str, severity: Severity = Severity.WARNING) -> None:
        """Tell its owner something."""
        _log.info("process %d, which sleeps until it is called: %s", self.pid, text)
        event = Event("sleeper", str(self.pid), text, severity, self.sleeper.owner)
        self._means.history.event(event)
