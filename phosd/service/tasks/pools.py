"""Keep programs of an image ready to be started: pools."""

import asyncio
import contextlib
import logging
import pwd
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from phosd.engine.image.manifest import Manifest
from phosd.engine.job.journal import JobRecord
from phosd.engine.job.progress import Progress
from phosd.engine.program.doors import places_of
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Busy, NoSuchImage, NoSuchProcess, PhosError, Unsupported, in_one_text
from phosd.service.history.events import Event, Severity
from phosd.service.history.history import History
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.options import PoolRequest, RestoreRequest, ResumeRequest
from phosd.service.jobs.pool import Member, Pool, PoolCounts, PoolRule
from phosd.service.jobs.table import Job, JobTable, Outcome, Task
from phosd.service.process_identity import ancestors, key_of
from phosd.service.tasks.kept_pool import KeptPool, clone_name
from phosd.service.tasks.pool_filler import HOLLOW, READY, PoolFiller
from phosd.units import counted

MOST_POOLS = 16
"""Pools of one user."""
IMAGE = "image"
"""What a program was started from if none waited."""
_TURN_SECONDS = 0.02
_STATE_AGAIN_SECONDS = 30.0
_SHOWN = 5
_log = logging.getLogger(__name__)


class Pools:
    """The pools of this node, and what keeps them filled. ``write_down`` writes a job's journal
    record, and ``told`` is called whenever a pool may have changed. Use it on the event loop only.
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
        self._filler = PoolFiller(engine, history, jobs, write_down, told)
        self._pools: dict[str, KeptPool] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._obeying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Go on with the pools of an earlier phosd, and with those of their programs that live."""
        for pool, members in self._history.pools.all():
            waiting = [each for each in members if each.suspension]
            started = [each.process for each in members if not each.suspension]
            self._keep(KeptPool(pool, waiting, started))

    async def close(self) -> None:
        """Fill no pool any more. Its programs stay as they are."""
        tasks = [*self._keepers.values(), *([self._obeying] if self._obeying else [])]
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def write_again(self) -> None:
        """Record all pools again in a new history file."""
        for kept in self._pools.values():
            self._filler.record(kept)

    def __iter__(self) -> Iterator[KeptPool]:
        return (each for each in self._pools.values() if not each.removed)

    async def look(self, pools: Iterable[KeptPool]) -> None:
        """Look which programs of these pools live, and which are ready."""
        for kept in pools:
            await asyncio.to_thread(self._filler.look, kept)
            self._told(kept)

    def counts(self) -> PoolCounts:
        """Return how many programs there are of all pools. Other threads may call it, too."""
        kept = tuple(self._pools.values())
        return PoolCounts(
            waiting=sum(len(each.resting) - len(each.are_ready) for each in kept),
            ready=sum(len(each.are_ready) for each in kept),
            running=sum(len(each.started) for each in kept),
            missing=sum(max(0, each.wanted - len(each.resting)) for each in kept),
        )

    def place_of(self, pid: int) -> tuple[str, bool]:
        """Return the pool that a process is of, or one above it (empty: none), and whether it waits
        there to be started.
        """
        if self._pools:
            above = ancestors(pid)
            for each in self:
                if above & each.pids:
                    return each.pool.name, any(m.process.pid in above for m in each.resting)
        return "", False

    def images(self) -> dict[str, str]:
        """Return the images that pools need, each with the name of a pool."""
        return {each.pool.image: each.pool.name for each in self}

    def named(self, name: str) -> Pool:
        """Return the pool of this name. Raises :class:`NoSuchProcess`."""
        return self._named(name).pool

    def obey(self, rules: Sequence[PoolRule]) -> None:
        """Keep the pools that the administrator states, and end those that are stated no more."""
        if self._obeying is not None:
            self._obeying.cancel()
        self._obeying = asyncio.get_running_loop().create_task(self._obey(rules))

    async def _obey(self, rules: Sequence[PoolRule]) -> None:
        """Make the pools what the rules say, and try again as long as one cannot be."""
        stated = {rule.name for rule in rules}
        for each in [each for each in self if each.pool.stated and each.pool.name not in stated]:
            await self.remove(each.pool.name)
        told: dict[str, str] = {}
        while rules := [rule for rule in rules if not await self._is_kept(rule, told)]:
            await asyncio.sleep(_STATE_AGAIN_SECONDS)

    async def _is_kept(self, rule: PoolRule, told: dict[str, str]) -> bool:
        """Make a pool what a rule says; return whether that could be, and tell once why not."""
        try:
            manifest = await asyncio.to_thread(_image_of, self._engine, rule.image)
            pool = msgspec.structs.replace(pool_of(rule.name, manifest, rule.size), stated=True)
            known = self._pools.get(rule.name)
            if known is not None and known.pool.stated and known.pool.image != pool.image:
                await self.remove(rule.name)
            elif known is not None and known.pool.stated:
                self.scale(rule.name, rule.size)
                return True
            self.create(pool)
        except PhosError as error:
            why = f"phosd.toml states this pool, and it cannot be had: {in_one_text(error)}"
            if told.get(rule.name) != why:
                told[rule.name] = why
                _log.warning("pool %s: %s", rule.name, why)
                self._history.event(Event("pool", rule.name, why, Severity.WARNING))
            return False
        return True

    def create(self, pool: Pool) -> None:
        """Begin a pool. Raises :class:`Busy` if there is one of this name, or the user has as many
        as one may.
        """
        if (known := self._pools.get(pool.name)) is not None:
            ours = known.pool.owner == pool.owner
            raise Busy(
                f"there is a pool {pool.name} already" + ("" if ours else ", of another user"),
                hint=f"`phos pool scale {pool.name}`, or choose another name"
                if ours
                else "choose another name: all pools of a node have different ones",
            )
        if sum(each.pool.owner == pool.owner for each in self) >= MOST_POOLS:
            raise Busy(
                f"uid {pool.owner} has {MOST_POOLS} pools, as many as one may",
                hint="end one (`phos pool rm`)",
            )
        self._keep(KeptPool(pool))
        self._filler.record(self._pools[pool.name])

    def scale(self, name: str, request: PoolRequest) -> None:
        """Change how many programs of a pool wait, and how many there may be."""
        kept = self._named(name)
        kept.pool = kept.pool.scaled(request)
        self._filler.record(kept)
        self._told(kept)
        kept.wake.set()

    async def remove(self, name: str) -> None:
        """End a pool, and its programs that were not started."""
        kept = self._named(name)
        with kept.lock:
            kept.removed = True
        self._told(kept)
        keeper = self._keepers.pop(name)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        if kept.job is not None and not kept.job.state.ended:
            self._jobs.cancel(kept.job)
            await self._jobs.wait(kept.job)
        await asyncio.to_thread(self._filler.look, kept)
        while (member := kept.taken()) is not None:
            await asyncio.to_thread(self._filler.end, member, kept.pool.owner)
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
            self._told(kept)

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
        self._filler.look(kept)
        while (member := self._next(kept, progress)) is not None:
            process, back = member.process, list[Member]()
            level = READY if member.suspension in self._engine.ready() else HOLLOW
            try:
                self._engine.resume(process.pid, ResumeRequest(), pool.owner, progress)
                return self._runs(kept, process, level, progress)
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
            request = RestoreRequest(clone=clone_name(pool), clone_ports="always")
            pid = self._engine.restore(pool.image, request, pool.owner, progress)
            return self._runs(kept, procfs.process_id(pid), IMAGE, progress)
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
                    return kept.soonest()
                if kept.room > 0 and not kept.readying:
                    kept.restoring += 1
                    return None
                if not (kept.making or kept.readying) or kept.room < 0:
                    raise _full(kept)
            progress.check()
            time.sleep(_TURN_SECONDS)

    def _runs(
        self, kept: KeptPool, process: ProcessId | None, level: str, progress: Progress
    ) -> Outcome:
        if process is None:
            raise NoSuchProcess(
                f"the program of the pool {kept.pool.name} has ended at once",
                hint=f"its output says why; `phos start {kept.pool.name}` starts another one",
            )
        with kept.lock:
            kept.started.append(process)
        self._filler.record(kept)
        with contextlib.suppress(Unsupported):  # they are too many to look at
            if found := places_of(process):
                more = f", and {len(found) - _SHOWN} more" * (len(found) > _SHOWN)
                progress.note(f"it listens on {', '.join(found[:_SHOWN])}{more}")
        made_of = kept.pool.image if level == IMAGE else ""
        return Outcome(str(process.pid), level, process=key_of(process.pid), made_of=made_of)

    def _keep(self, kept: KeptPool) -> None:
        self._pools[kept.pool.name] = kept
        self._told(kept)
        keeper = asyncio.get_running_loop().create_task(self._filler.fill(kept))
        self._keepers[kept.pool.name] = keeper

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


def _image_of(engine: Engine, named: str) -> Manifest:
    """Return the image that a rule names. Raises :class:`NoSuchImage`."""
    user, _, name = named.rpartition("/")
    images = engine.images()
    found = [each for each in images if named == each.id]
    if user:
        with contextlib.suppress(KeyError):  # there is no such user
            owner = int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
            found = [each for each in images if (each.owner, each.name) == (owner, name)]
    if not found:
        raise NoSuchImage(
            f"there is no image {named}", hint="write its id, or USER/NAME (`phos images`)"
        )
    return max(found, key=lambda each: each.id)


def pool_of(name: str, manifest: Manifest, request: PoolRequest) -> Pool:
    """Return a new pool of an image, which belongs to the owner of that."""
    return Pool(name, manifest.owner, manifest.id, called=manifest.called).scaled(request)


def told_of_start(record: JobRecord, settled: str, resting: Collection[int]) -> tuple[str, str]:
    """Say what has come of a start that phosd did not survive, and whose pid nobody was told; and
    that pid, if it runs. ``settled``: what is said of other jobs; ``resting``: the processes that
    are suspended now.
    """
    known = record.affected.processes if record.affected is not None else ()
    pids = [each.pid for each in known if each.start_time is not None]
    if not pids:  # one was being restored
        return settled, ""
    if {*resting} & {*pids}:
        return f"no program of the pool was started; `phos start {record.target}` starts one", ""
    text = f"process {min(pids)} of the pool runs; `phos pool ls {record.target}` lists what does"
    return text, str(min(pids))
