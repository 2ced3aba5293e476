"""Keep a pool filled: make its programs, and have as many of them ready as it says."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from phosd.engine.job.progress import Progress
from phosd.engine.node.suspended import Suspended
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Cancelled, NoSuchProcess, PhosError, in_one_text
from phosd.service.history.events import Event, Severity
from phosd.service.history.history import History
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.job import moved_text
from phosd.service.jobs.options import RestoreRequest, ResumeRequest, SuspendRequest
from phosd.service.jobs.pool import Member
from phosd.service.jobs.table import Job, JobTable, Outcome, Task
from phosd.service.process_identity import key_of
from phosd.service.tasks.checkpoints import claim_of
from phosd.service.tasks.kept_pool import KeptPool

READY, HOLLOW = "ready", "hollow"
"""How a program waits."""
_LOOK_SECONDS = 2.0
"""Seconds between two looks whether programs of a pool have ended."""
_FIRST_DELAY, _MOST_DELAY = 2.0, 300.0
"""Seconds until what has failed is tried again; they double with each failure."""
_log = logging.getLogger(__name__)


class PoolFiller:
    """Fills the pools of this node. ``write_down`` writes a job's journal record, and ``told`` is
    called on the event loop whenever a pool may have changed.
    """

    def __init__(
        self,
        engine: Engine,
        history: History,
        jobs: JobTable,
        write_down: Callable[[Job], None],
        told: Callable[[KeptPool], None],
    ) -> None:
        self._engine = engine
        self._history = history
        self._jobs = jobs
        self._write_down = write_down
        self._told = told

    async def fill(self, kept: KeptPool) -> None:
        """Do what is missing, for ever: see :meth:`_step`."""
        delay = _FIRST_DELAY
        while True:
            kept.wake.clear()
            await asyncio.to_thread(self.look, kept)
            self._told(kept)
            pause = _LOOK_SECONDS
            try:
                if await self._step(kept):
                    delay, kept.trouble = _FIRST_DELAY, ""
                    continue
            except Cancelled:
                pause = delay
            except PhosError as error:
                what = "it cannot be filled"
                if len(kept.waiting) >= kept.wanted:
                    what = "no more of its programs can be ready"
                self._tell(kept, what, in_one_text(error))
                self._told(kept)
                pause, delay = delay, min(2 * delay, _MOST_DELAY)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await kept.wake.wait()

    async def _step(self, kept: KeptPool) -> bool:
        """Make a program if one is missing, or end one that is one too many; then have one ready,
        or hollow again. Returns whether there was something to do, and it is done.
        """
        if len(kept.waiting) > kept.wanted:
            if member := kept.taken():
                await asyncio.to_thread(self.end, member, kept.pool.owner)
                self.record(kept)
            return True
        if len(kept.waiting) < kept.wanted and (clone := kept.reserved()):
            await self._make(kept, clone)
            return True
        if member := kept.to_unload:
            await self._unload(kept, member)
            return True
        if member := kept.to_load:
            return await self._load(kept, member)
        return False

    async def _make(self, kept: KeptPool, clone: str) -> None:
        """Restore a hollow program of the pool's image, for which there is room."""
        try:
            await self._made(kept, clone)
        finally:
            with kept.lock:
                kept.making.discard(clone)

    async def _made(self, kept: KeptPool, clone: str) -> None:
        pool = kept.pool
        manifest = await asyncio.to_thread(self._engine.image, pool.image)
        request = RestoreRequest(clone=clone, clone_ports="always", hollow=True)

        def work(progress: Progress) -> Outcome:
            pid = self._engine.restore(pool.image, request, pool.owner, progress)
            found = self._suspended(pid)
            with kept.lock:  # noted here: phosd may be ending
                if found is not None:
                    process = ProcessId(found.pid, found.start_time)
                    kept.waiting.append(Member(process, found.image))
                kept.making.discard(clone)
            self.record(kept)
            return Outcome(str(pid), HOLLOW, process=key_of(pid), made_of=pool.image)

        task = Task(
            *("restore", pool.image, pool.owner, frozenset((f"image {pool.image}",)), work),
            queue=True,
            gpus=frozenset(gpu.ordinal for gpu in manifest.gpus),
            called=manifest.called,
        )
        kept.job = self._jobs.submit(task, self._write_down)
        await self._jobs.result(kept.job)

    async def _load(self, kept: KeptPool, member: Member) -> bool:
        """Make a hollow program ready. Returns whether it is: it may have been started before."""

        def load(progress: Progress) -> str:
            pid = member.process.pid
            moved = self._engine.resume(pid, ResumeRequest(ready=True), kept.pool.owner, progress)
            return moved_text(moved)

        await self._moved(kept, member, "resume", READY, load)
        return member.suspension in await asyncio.to_thread(self._engine.ready)

    async def _unload(self, kept: KeptPool, member: Member) -> None:
        """Make a program that is ready hollow."""

        def unload(progress: Progress) -> str:
            pid = member.process.pid
            return self._engine.suspend(pid, SuspendRequest(hollow=True), kept.pool.owner, progress)

        await self._moved(kept, member, "suspend", HOLLOW, unload)

    async def _moved(
        self,
        kept: KeptPool,
        member: Member,
        operation: str,
        level: str,
        act: Callable[[Progress], str],
    ) -> None:
        """Bring a program that waits to another level, in a job."""
        pid = member.process.pid
        found = await asyncio.to_thread(self._suspended, pid)

        def work(progress: Progress) -> Outcome:
            done = ""
            with kept.moving(member) as there:
                if there:
                    try:
                        done = act(progress)
                    except NoSuchProcess as error:  # as whoever looks next finds, too
                        progress.note(f"process {pid} of the pool is gone: {error}")
                    kept.ready = self._engine.ready()
            return Outcome(done, level, process=key_of(pid))

        task = Task(
            *(operation, str(pid), kept.pool.owner, frozenset((claim_of(pid),)), work),
            queue=True,
            gpus=frozenset(found.gpus if found is not None else ()),
            called=kept.pool.called,
        )
        kept.job = self._jobs.submit(task, self._write_down)
        await self._jobs.result(kept.job)

    def _suspended(self, pid: int) -> Suspended | None:
        """Return the suspended program of a pid, if it is still suspended."""
        return next((each for each in self._engine.suspended() if each.pid == pid), None)

    def end(self, member: Member, owner: int) -> None:
        """End a program that waits; what fails is told in the log."""
        pid = member.process.pid
        try:
            self._engine.end_suspended(pid, owner, Progress())
        except PhosError as error:
            _log.warning("process %d of a pool could not be ended: %s", pid, error)

    def look(self, kept: KeptPool) -> None:
        """Leave out programs that have ended. One whose user has resumed it counts as started, also
        when it was suspended since: what waits does so in the suspension in which it was made.
        """
        resting = {each.image for each in self._engine.suspended()}
        ready = self._engine.ready()
        with kept.lock:
            before = kept.members
            kept.ready = ready
            awake = [each.process for each in kept.waiting if each.suspension not in resting]
            kept.waiting = [each for each in kept.waiting if each.suspension in resting]
            kept.started = [
                each for each in (*kept.started, *awake) if procfs.process_id(each.pid) == each
            ]
            changed = kept.members != before
        if changed:
            self.record(kept)

    def record(self, kept: KeptPool) -> None:
        """Record a pool and its programs, unless it is removed."""
        with kept.lock:  # held: it may be removed meanwhile
            if not kept.removed:
                self._history.pools.record(kept.pool, kept.members)

    def _tell(self, kept: KeptPool, what: str, why: str) -> None:
        """Note why something cannot be, and tell it once."""
        if why != kept.trouble:
            kept.trouble = why
            said = f"{what}: {why}"
            event = Event("pool", kept.pool.name, said, Severity.WARNING, kept.pool.owner)
            self._history.event(event)
