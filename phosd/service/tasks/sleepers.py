"""Wake programs when somebody calls them, and let them fall asleep when they have nothing to do.

A program that sleeps is hollow: frozen, with its contexts on its GPUs. A call is seen from outside
(:mod:`phosd.engine.program.doors`), and the program takes it itself when it runs again.
"""

import asyncio
import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from phosd.engine.image.called import Called
from phosd.engine.job.progress import Progress
from phosd.engine.node.suspended import Suspended
from phosd.engine.program.doors import Doors, open_doors, places
from phosd.engine.system import procfs
from phosd.engine.system.freezer import with_those_below
from phosd.engine.system.procfs import ProcessId
from phosd.errors import (
    Busy,
    NoSuchProcess,
    OutOfMemory,
    PhosError,
    Timeout,
    Unsupported,
    in_one_text,
)
from phosd.service.history.events import Event, Severity
from phosd.service.history.history import History
from phosd.service.jobs.engine import Programs
from phosd.service.jobs.options import ResumeRequest, SleepRequest
from phosd.service.jobs.sleeper import Sleeper
from phosd.service.jobs.table import Job, JobTable, Outcome, Task
from phosd.service.process_identity import Target, key_of
from phosd.service.tasks.checkpoints import claim_of

MOST_SLEEPERS = 64
"""Sleepers of one user: each has descriptors in phosd."""
_LOOK_SECONDS = 2.0
"""Seconds between two looks whether somebody else has resumed or suspended a program."""
_READ_SECONDS = 0.5
"""Seconds between two looks whether something was sent on a connection that it had accepted."""
_SHORTEST, _LONGEST = 0.25, 15.0
"""Seconds between two looks whether a program has computed."""
_TURN_SECONDS = 1.0
"""Seconds that a program must have been quiet before another one may take its place."""
_FIRST_DELAY, _MOST_DELAY = 2.0, 300.0
"""Seconds until something is tried again after a failure; they double with each."""
_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Kept:
    """A sleeper. ``launched`` is how many kernels it had launched when it was last looked at, and
    ``quiet_since`` when it was last seen to have launched one, on the loop's clock.
    """

    sleeper: Sleeper
    launched: int = 0
    quiet_since: float = math.inf
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it falls asleep or wakes."""

    @property
    def pid(self) -> int:
        return self.sleeper.process.pid


class Sleepers:
    """The sleepers of this node. ``write_down`` writes a job's journal record; ``changed`` is
    called with the processes of one that has become one, or is none any more. Use it on the event
    loop only.
    """

    def __init__(
        self,
        engine: Programs,
        history: History,
        jobs: JobTable,
        write_down: Callable[[Job], None],
        changed: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._history = history
        self._jobs = jobs
        self._write_down = write_down
        self._changed = changed
        self._kept: dict[ProcessId, _Kept] = {}
        self._watches: dict[ProcessId, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Go on with the sleepers of an earlier phosd."""
        for sleeper in self._history.sleepers.all():
            self._keep(sleeper)

    async def close(self) -> None:
        """Wake nobody any more. The next phosd goes on."""
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)

    def of(self, process: ProcessId) -> Sleeper | None:
        """Return the sleeper that a process is of; None if it is of none."""
        found = (each.sleeper for each in self._kept.values())
        return next((s for s in found if process == s.process or process in s.users), None)

    async def require_room(self, target: Target) -> None:
        """Raise :class:`Unsupported` if nobody could call the program of a process, and
        :class:`Busy` if its user has as many sleepers as one may.
        """
        if not await asyncio.to_thread(lambda: places(with_those_below([target.id]))):
            raise Unsupported(
                f"nothing would wake process {target.pid}: it listens on no socket",
                hint="suspend it without `wake` and `idle`, and `phos resume` it",
            )
        if sum(each.sleeper.owner == target.uid for each in self._kept.values()) >= MOST_SLEEPERS:
            raise Busy(
                f"uid {target.uid} has {MOST_SLEEPERS} programs that are woken when they are "
                "called, as many as one may",
                hint="end or resume one (`phos ps`)",
            )

    # In a job's thread

    def begin(
        self,
        loop: asyncio.AbstractEventLoop,
        target: Target,
        acting: int,
        request: SleepRequest,
        called: Called,
    ) -> None:
        """Wake a program that was just suspended when somebody calls it. ``acting`` is the user id
        whose rights count.
        """
        found = self.hollow(target.id)
        if found is not None:
            process = ProcessId(found.pid, found.start_time)
            sleeper = Sleeper(process, found.owner, acting, request, "", (), (), called)
            loop.call_soon_threadsafe(self._keep, sleeper.asleep(found))

    def hollow(self, process: ProcessId) -> Suspended | None:
        """Return the suspension of the program that has a process, if it is hollow."""
        found = self._suspended(process)
        return found if found is not None and found.hollow else None

    def _suspended(self, process: ProcessId) -> Suspended | None:
        """Return the suspension of the program that has a process."""
        found = (each for each in self._engine.suspended() if process in each.roots)
        return next(found, None)

    def _is_as_left(self, kept: _Kept) -> bool:
        """Return whether a sleeper lives, and nobody else has resumed or suspended it, or taken its
        contexts off: then it is not frozen, and may take a call that it cannot answer.
        """
        sleeper = kept.sleeper
        if procfs.process_id(kept.pid) != sleeper.process:
            return False
        found = self._suspended(sleeper.process)
        if found is None:
            return not sleeper.suspension
        return found.hollow and found.image == sleeper.suspension

    def _launches(self, kept: _Kept, seconds: float) -> int:
        """Return how many kernels a sleeper has launched since they are counted, and count them for
        so many seconds more.
        """
        total = 0
        for process in kept.sleeper.users:
            if procfs.process_id(process.pid) == process:
                with contextlib.suppress(NoSuchProcess):
                    total += self._engine.launch_count(process, math.ceil(seconds))
        return total

    # Its life

    def _keep(self, sleeper: Sleeper) -> None:
        if (before := self._watches.get(sleeper.process)) is not None:
            before.cancel()
        kept = _Kept(sleeper)
        self._kept[sleeper.process] = kept
        self._record(kept)
        watch = asyncio.get_running_loop().create_task(self._watch(kept))
        watch.add_done_callback(partial(self._watched, kept))
        self._watches[sleeper.process] = watch
        self._tell_changed(kept)

    def _watched(self, kept: _Kept, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled() and watch.exception() is not None:
            _log.error("nobody wakes process %d", kept.pid, exc_info=watch.exception())
            self._tell(kept, "nobody wakes it any more; phosd's log has the details")

    async def _watch(self, kept: _Kept) -> None:
        """Wake a program and let it fall asleep, until it ends, or somebody else does."""
        delay = _FIRST_DELAY
        while await self._goes_on(kept):
            try:
                if kept.sleeper.suspension:
                    if await self._is_called(kept):
                        await self._wake(kept)
                elif not kept.sleeper.idle:
                    break
                elif await self._is_idle(kept):
                    await self._put_to_sleep(kept, "it has computed nothing for a while")
                delay = _FIRST_DELAY
            except PhosError as error:
                self._tell(kept, in_one_text(error))
                await asyncio.sleep(delay)
                delay = min(2 * delay, _MOST_DELAY)
        if self._kept.get(kept.sleeper.process) is kept:
            self._forget(kept)

    def _forget(self, kept: _Kept) -> None:
        process = kept.sleeper.process
        del self._kept[process], self._watches[process]
        self._history.sleepers.forget(process)
        if kept.sleeper.idle and procfs.process_id(process.pid) == process:
            text = "a call does not wake it any more: somebody has resumed or suspended it"
            self._tell(kept, text, Severity.INFO)
        self._tell_changed(kept)

    async def _goes_on(self, kept: _Kept) -> bool:
        async with kept.turn:
            return await asyncio.to_thread(self._is_as_left, kept)

    # Asleep

    async def _is_called(self, kept: _Kept) -> bool:
        """Wait until somebody calls a program, or one of its processes ends; False: it is not as it
        was left.
        """
        doors = await asyncio.to_thread(self._doors, kept)
        reads = any(doors.accepted.values())
        woken, looked = asyncio.Event(), asyncio.get_running_loop().time()
        with contextlib.closing(doors), _watched_for(kept, doors, woken.set):
            while not woken.is_set():
                if reads and await asyncio.to_thread(lambda: doors.is_sent_to):
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_READ_SECONDS if reads else _LOOK_SECONDS):
                        await woken.wait()
                now = asyncio.get_running_loop().time()
                if not woken.is_set() and now - looked >= _LOOK_SECONDS:
                    looked = now
                    if not await self._goes_on(kept):
                        return False
        return await self._goes_on(kept)

    def _doors(self, kept: _Kept) -> Doors:
        return open_doors([*with_those_below([kept.sleeper.process, *kept.sleeper.users])])

    async def _wake(self, kept: _Kept) -> None:
        async with kept.turn:
            while True:
                try:
                    await self._resume(kept)
                    return
                except OutOfMemory:
                    if not await self._one_leaves({*kept.sleeper.gpus}):
                        raise

    async def _resume(self, kept: _Kept) -> None:
        sleeper = kept.sleeper

        def work(progress: Progress) -> Outcome:
            progress.note("somebody called it")
            moved = self._engine.resume(kept.pid, ResumeRequest(), sleeper.acting, progress)
            kept.sleeper = sleeper.awake(tuple(sorted(moved.values())))
            self._record(kept)
            return Outcome(",".join(f"{old}:{new}" for old, new in sorted(moved.items())))

        await self._do("resume", sleeper, work)

    # Awake

    async def _is_idle(self, kept: _Kept) -> bool:
        """Wait until a program has computed nothing for as long as it says; False: it is not as it
        was left, or sleeps.
        """
        loop = asyncio.get_running_loop()
        period = min(max(kept.sleeper.idle / 4, _SHORTEST), _LONGEST)
        kept.quiet_since = loop.time()
        while True:
            with contextlib.suppress(Busy, Timeout):  # a job works on it
                launched = await asyncio.to_thread(self._launches, kept, 2 * period + 1)
                # A checkpoint counts anew.
                if launched not in (0, kept.launched):
                    kept.quiet_since = loop.time()
                kept.launched = launched
            if loop.time() - kept.quiet_since >= kept.sleeper.idle:
                return True
            await asyncio.sleep(period)
            if not await self._goes_on(kept) or kept.sleeper.suspension:
                return False

    async def _one_leaves(self, gpus: set[int]) -> bool:
        """Put a program to sleep that falls asleep by itself and has nothing to do on these GPUs:
        the one that has had nothing to do for longest. Returns whether there was one.
        """
        there = [each for each in self._kept.values() if each.sleeper.idle]
        for each in sorted(there, key=lambda each: each.quiet_since):
            if each.sleeper.suspension or not gpus & {*each.sleeper.gpus}:
                continue
            try:
                launched = await asyncio.to_thread(self._launches, each, 2 * _LONGEST + 1)
                quiet = asyncio.get_running_loop().time() - each.quiet_since
                if launched in (0, each.launched) and quiet >= _TURN_SECONDS:
                    await self._put_to_sleep(each, "a program was called that needs its GPU")
                    return True
            except PhosError as error:
                _log.info("process %d keeps its GPU: %s", each.pid, error)
        return False

    async def _put_to_sleep(self, kept: _Kept, why: str) -> None:
        async with kept.turn:
            sleeper = kept.sleeper
            if sleeper.suspension:
                return

            def work(progress: Progress) -> Outcome:
                progress.note(why)
                request = sleeper.request.each
                where = self._engine.suspend(kept.pid, request, sleeper.acting, progress)
                if (found := self._suspended(sleeper.process)) is not None:
                    kept.sleeper = sleeper.asleep(found)
                    self._record(kept)
                return Outcome(where, where)

            await self._do("suspend", sleeper, work)

    # Both

    async def _do(
        self, operation: str, sleeper: Sleeper, work: Callable[[Progress], Outcome]
    ) -> None:
        pid = sleeper.process.pid
        task = Task(
            *(operation, str(pid), sleeper.owner, frozenset((claim_of(pid),)), work),
            queue=True,
            process=key_of(pid),
            gpus=frozenset(sleeper.gpus),
            called=sleeper.called,
        )
        await self._jobs.result(self._jobs.submit(task, self._write_down))

    def _record(self, kept: _Kept) -> None:
        self._history.sleepers.record(kept.sleeper)

    def _tell_changed(self, kept: _Kept) -> None:
        for process in {kept.sleeper.process, *kept.sleeper.users}:
            self._changed(process.pid)

    def _tell(self, kept: _Kept, text: str, severity: Severity = Severity.WARNING) -> None:
        _log.info("process %d, which sleeps until it is called: %s", kept.pid, text)
        self._history.event(Event("sleeper", str(kept.pid), text, severity, kept.sleeper.owner))


@contextlib.contextmanager
def _watched_for(kept: _Kept, doors: Doors, call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` when somebody is at the doors of a program, or a process of it ends."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:

        def watch(descriptor: int) -> None:
            loop.add_reader(descriptor, call)
            stack.callback(loop.remove_reader, descriptor)

        for process in {kept.sleeper.process, *kept.sleeper.users}:
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(process.pid)
                stack.callback(os.close, pidfd)
                watch(pidfd)
        for each in doors.listening:
            watch(each.fileno())
        yield
