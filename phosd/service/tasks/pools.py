"""Keep programs of an image ready to be started: pools."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator

from phosd.engine.image.manifest import Manifest
from phosd.engine.job.progress import Progress
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, Cancelled, NoSuchProcess, PhosError, in_one_text
from phosd.service.history.events import Event, Severity
from phosd.service.history.history import History
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.options import PoolRequest, RestoreRequest, ResumeRequest
from phosd.service.jobs.pool import Member, Pool, PoolCounts
from phosd.service.jobs.table import Job, JobTable, Outcome, Task
from phosd.service.process_identity import ancestors, key_of
from phosd.service.tasks.kept_pool import KeptPool
from phosd.units import counted

MOST_POOLS = 16
"""Pools of one user."""
HOLLOW, IMAGE = "hollow", "image"
"""What a program was started from."""
_LOOK_SECONDS = 2.0
"""Seconds between two looks whether programs of a pool have ended."""
_TURN_SECONDS = 0.02
_FIRST_DELAY, _MOST_DELAY = 2.0, 300.0
"""Seconds until a program is made again after a failure; they double with each."""
_log = logging.getLogger(__name__)


class Pools:
    """The pools of this node, and what keeps them filled. ``write_down`` writes a job's journal
    record. Use it on the event loop only.
    """

    def __init__(
        self,
        engine: Engine,
        history: History,
        jobs: JobTable,
        write_down: Callable[[Job], None],
    ) -> None:
        self._engine = engine
        self._history = history
        self._jobs = jobs
        self._write_down = write_down
        self._pools: dict[str, KeptPool] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Go on with the pools of an earlier phosd, and with those of their programs that live."""
        for pool, members in self._history.pools.all():
            waiting = [each for each in members if each.suspension]
            started = [each.process for each in members if not each.suspension]
            self._keep(KeptPool(pool, waiting, started))

    async def close(self) -> None:
        """Fill no pool any more. Its programs stay as they are."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)

    def write_again(self) -> None:
        """Record all pools again in a new history file."""
        for kept in self._pools.values():
            self._record(kept)

    def __iter__(self) -> Iterator[KeptPool]:
        return (each for each in self._pools.values() if not each.removed)

    def counts(self) -> PoolCounts:
        """Return how many programs there are of all pools. Other threads may call it, too."""
        kept = tuple(self._pools.values())
        return PoolCounts(
            waiting=sum(len(each.waiting) for each in kept),
            running=sum(len(each.started) for each in kept),
            missing=sum(max(0, each.pool.hollow - len(each.waiting)) for each in kept),
        )

    def of(self, pid: int) -> str:
        """Return the pool that a process is of, or one above it; empty: none."""
        if not self._pools:
            return ""
        above = ancestors(pid)
        return next((each.pool.name for each in self if above & each.pids), "")

    def images(self) -> dict[str, str]:
        """Return the images that pools need, each with the name of a pool."""
        return {each.pool.image: each.pool.name for each in self}

    def named(self, name: str) -> Pool:
        """Return the pool of this name. Raises :class:`NoSuchProcess`."""
        return self._named(name).pool

    def create(self, pool: Pool) -> None:
        """Begin a pool. Raises :class:`Busy` if there is one of this name, or the user has as many
        as one may.
        """
        if pool.name in self._pools:
            raise Busy(
                f"there is a pool {pool.name} already",
                hint=f"`phos pool scale {pool.name}`, or choose another name",
            )
        if sum(each.pool.owner == pool.owner for each in self) >= MOST_POOLS:
            raise Busy(
                f"uid {pool.owner} has {MOST_POOLS} pools, as many as one may",
                hint="end one (`phos pool rm`)",
            )
        self._keep(KeptPool(pool))
        self._record(self._pools[pool.name])

    def scale(self, name: str, request: PoolRequest) -> None:
        """Change how many programs of a pool wait, and how many there may be."""
        kept = self._named(name)
        kept.pool = kept.pool.scaled(request)
        self._record(kept)
        kept.wake.set()

    async def remove(self, name: str) -> None:
        """End a pool, and its programs that were not started."""
        kept = self._named(name)
        with kept.lock:
            kept.removed = True
        keeper = self._keepers.pop(name)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        if kept.job is not None and not kept.job.state.ended:
            self._jobs.cancel(kept.job)
            await self._jobs.wait(kept.job)
        await asyncio.to_thread(self._look, kept)
        while (member := _taken(kept)) is not None:
            await asyncio.to_thread(self._end, member, kept.pool.owner)
        self._history.pools.forget(name)
        del self._pools[name]

    def begin(self, name: str, caller: int, token: str) -> Job:
        """Start a program of a pool for user id ``caller``: one that waits, or, if there is none,
        one that is restored now. Raises :class:`Busy` if the pool has as many as it may.
        """
        kept = self._named(name)
        pool = kept.pool
        loop = asyncio.get_running_loop()

        def over() -> None:
            kept.starting -= 1
            kept.wake.set()

        def work(progress: Progress) -> Outcome:
            try:
                return self._started(kept, progress)
            finally:
                loop.call_soon_threadsafe(over)

        def prepare(job: Job) -> None:
            if kept.is_exhausted:
                raise _full(kept)
            self._write_down(job)
            kept.starting += 1

        task = Task(
            *("start", name, caller, frozenset[str](), work),
            token=token,
            called=pool.called,
        )
        return self._jobs.submit(task, prepare)

    # In a job's thread

    def _started(self, kept: KeptPool, progress: Progress) -> Outcome:
        pool = kept.pool
        self._look(kept)
        while (member := self._next(kept, progress)) is not None:
            process, back = member.process, list[Member]()
            try:
                self._engine.resume(process.pid, ResumeRequest(), pool.owner, progress)
                return self._runs(kept, process, HOLLOW)
            except NoSuchProcess as error:  # it has died in its sleep
                progress.note(f"process {process.pid} of the pool is gone: {error}")
            except PhosError:
                back.append(member)
                raise
            finally:
                with kept.lock:
                    kept.resuming -= 1
                    kept.waiting[:0] = back
        try:
            request = RestoreRequest(clone=_clone_name(pool))
            pid = self._engine.restore(pool.image, request, pool.owner, progress)
            return self._runs(kept, procfs.process_id(pid), IMAGE)
        finally:
            with kept.lock:
                kept.restoring -= 1

    def _next(self, kept: KeptPool, progress: Progress) -> Member | None:
        """Take one that waits, or is being made if no other may be; None: there is room for one
        that is restored, which counts from now on. Raises :class:`Busy` if there is none.
        """
        while True:
            with kept.lock:
                if kept.removed:
                    raise _removed(kept.pool.name)
                if kept.waiting and kept.room >= 0:
                    kept.resuming += 1
                    return kept.waiting.pop(0)
                if kept.room > 0:
                    kept.restoring += 1
                    return None
                if not kept.making or kept.room < 0:
                    raise _full(kept)
            progress.check()
            time.sleep(_TURN_SECONDS)

    def _runs(self, kept: KeptPool, process: ProcessId | None, level: str) -> Outcome:
        if process is None:
            return Outcome("", level)
        with kept.lock:
            kept.started.append(process)
        self._record(kept)
        return Outcome(str(process.pid), level, process=key_of(process.pid))

    def _end(self, member: Member, owner: int) -> None:
        pid = member.process.pid
        try:
            self._engine.end_suspended(pid, owner, Progress())
        except PhosError as error:
            _log.warning("process %d of a pool could not be ended: %s", pid, error)

    # Filling

    def _keep(self, kept: KeptPool) -> None:
        self._pools[kept.pool.name] = kept
        keeper = asyncio.get_running_loop().create_task(self._fill(kept))
        self._keepers[kept.pool.name] = keeper

    async def _fill(self, kept: KeptPool) -> None:
        """Make a program whenever one is missing, and end one whenever there is one too many."""
        delay = _FIRST_DELAY
        while True:
            kept.wake.clear()
            await asyncio.to_thread(self._look, kept)
            pause = _LOOK_SECONDS
            if len(kept.waiting) > kept.wanted:
                if (member := _taken(kept)) is not None:
                    await asyncio.to_thread(self._end, member, kept.pool.owner)
                    self._record(kept)
                continue
            if len(kept.waiting) < kept.wanted and (clone := _reserved(kept)):
                try:
                    await self._make(kept, clone)
                    delay, kept.trouble = _FIRST_DELAY, ""
                    continue
                except Cancelled:
                    pause = delay
                except PhosError as error:
                    self._tell(kept, in_one_text(error))
                    pause, delay = delay, min(2 * delay, _MOST_DELAY)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await kept.wake.wait()

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
        request = RestoreRequest(clone=clone, hollow=True)

        def work(progress: Progress) -> Outcome:
            pid = self._engine.restore(pool.image, request, pool.owner, progress)
            with kept.lock:  # noted here: phosd may be ending
                kept.waiting += self._suspended(pid)
                kept.making.discard(clone)
            self._record(kept)
            return Outcome(str(pid), HOLLOW, process=key_of(pid))

        task = Task(
            *("restore", pool.image, pool.owner, frozenset((f"image {pool.image}",)), work),
            queue=True,
            gpus=frozenset(gpu.ordinal for gpu in manifest.gpus),
            called=manifest.called,
        )
        kept.job = self._jobs.submit(task, self._write_down)
        await self._jobs.result(kept.job)

    def _suspended(self, pid: int) -> list[Member]:
        """Return the suspended program of a pid, if it is still suspended."""
        found = (each for each in self._engine.suspended() if each.pid == pid)
        return [Member(ProcessId(each.pid, each.start_time), each.image) for each in found][:1]

    def _look(self, kept: KeptPool) -> None:
        """Leave out programs that have ended. One whose user has resumed it counts as started, also
        when it was suspended since: what waits does so in the suspension in which it was made.
        """
        resting = {each.image for each in self._engine.suspended()}
        with kept.lock:
            before = kept.members
            awake = [each.process for each in kept.waiting if each.suspension not in resting]
            kept.waiting = [each for each in kept.waiting if each.suspension in resting]
            kept.started = [
                each for each in (*kept.started, *awake) if procfs.process_id(each.pid) == each
            ]
            changed = kept.members != before
        if changed:
            self._record(kept)

    def _record(self, kept: KeptPool) -> None:
        with kept.lock:  # held: it may be removed meanwhile
            if not kept.removed:
                self._history.pools.record(kept.pool, kept.members)

    def _tell(self, kept: KeptPool, text: str) -> None:
        if text != kept.trouble:
            kept.trouble = text
            said = f"no program of it could be made: {text}"
            event = Event("pool", kept.pool.name, said, Severity.WARNING, kept.pool.owner)
            self._history.event(event)

    def _named(self, name: str) -> KeptPool:
        kept = self._pools.get(name)
        if kept is None or kept.removed:
            raise _removed(name)
        return kept


def _removed(name: str) -> NoSuchProcess:
    return NoSuchProcess(f"there is no pool {name}", hint="`phos pool` lists them")


def _full(kept: KeptPool) -> Busy:
    name, most = kept.pool.name, kept.pool.most
    return Busy(
        f"the pool {name} has {counted(most, 'program')}, as many as it may",
        hint=f"end one, or `phos pool scale {name} --max {most + 1}`",
    )


def pool_of(name: str, manifest: Manifest, request: PoolRequest) -> Pool:
    """Return a new pool of an image, which belongs to the owner of that."""
    return Pool(name, manifest.owner, manifest.id, called=manifest.called).scaled(request)


def _taken(kept: KeptPool) -> Member | None:
    """Take the program out that has waited longest; None if none waits."""
    with kept.lock:
        return kept.waiting.pop(0) if kept.waiting else None


def _reserved(kept: KeptPool) -> str:
    """Count one more that is being made, if there is room for it. Returns its name, or nothing."""
    with kept.lock:
        if kept.room <= 0:
            return ""
        kept.making.add(clone := _clone_name(kept.pool))
        return clone


def _clone_name(pool: Pool) -> str:
    return f"{pool.name[:23]}-{secrets.token_hex(4)}"
