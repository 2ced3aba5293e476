"""Run the daemon behind the bus: start, background work, reconfiguration and shutdown."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from phosd import __version__, installation
from phosd.bus import ROOT
from phosd.engine.job.affected import InterruptedJob
from phosd.engine.job.journal import Journal
from phosd.engine.system.procfs import boot_id
from phosd.errors import PhosError, Reason, Unsupported
from phosd.interface.methods import features
from phosd.service.api.inventory import Inventory
from phosd.service.api.maintenance import Maintenance
from phosd.service.api.views import job_path
from phosd.service.config import Config
from phosd.service.dbus.object_tree import ObjectTree
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.history import events
from phosd.service.history.history import History
from phosd.service.jobs.engine import Programs
from phosd.service.jobs.table import Job, JobTable
from phosd.service.tasks.analyses import Analyses
from phosd.service.tasks.own_checkpoints import OwnCheckpoints
from phosd.service.tasks.periodic import Periodic
from phosd.service.tasks.pools import Pools, told_of_start
from phosd.service.tasks.runtime_checkpoints import RuntimeCheckpoints
from phosd.service.tasks.sleepers import Sleepers

_CHANGEABLE = (
    *("retention_days", "periodic", "limits", "pools"),
    *("max_jobs", "jobs_per_gpu", "min_free"),
)
"""Settings that can change while phosd runs."""
_OF_IMAGES = frozenset(("checkpoint", "verify", "delete", "export", "import"))
"""Jobs that make, read or remove an image; all others change programs."""
_URGENT = frozenset(("start",))
"""Jobs whose result is wanted at once: what they have changed comes to the bus after it."""
_ADD_IMAGES = frozenset(("checkpoint", "import"))
_RESULTS_SECONDS = 10.0
_log = logging.getLogger(__name__)


if TYPE_CHECKING:
    from phosd.service.api.metrics import Metrics


@dataclass(eq=False)
class Manager:
    """The target of the ``org.phos.Manager1`` object. Use it on the event loop only."""

    version = __version__

    config: Config
    engine: Programs
    history: History
    journal: Journal
    tree: ObjectTree
    jobs: JobTable
    periodic: Periodic
    own_checkpoints: OwnCheckpoints
    runtime_checkpoints: RuntimeCheckpoints
    query_pool: QueryPool
    inventory: Inventory
    maintenance: Maintenance
    analyses: Analyses
    pools: Pools
    sleepers: Sleepers
    _metrics: "Metrics | None" = field(default=None, init=False)
    _background: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def settle(self) -> None:
        """Settle the jobs that an earlier phosd left unfinished. Call it before serving clients. If
        that fails, the journal keeps the jobs for the next start, and phosd serves nevertheless.
        """
        records = self.journal.interrupted()
        here = [InterruptedJob(r.job, r.affected) for r in records if r.boot_id == boot_id()]
        try:
            said = await asyncio.to_thread(self.engine.settle, here)
        except (PhosError, OSError) as error:
            _log.error("what an earlier phosd left is not settled: %s; see `phos doctor`", error)
            return
        resting = {pid for each in self.engine.suspended() for pid in each.pids}
        for record in records:
            done = said.get(record.job, "the machine was started anew, so its processes are gone")
            pid = ""
            if record.operation == "start" and record.job in said:
                done, pid = told_of_start(record, done, resting)
            _log.warning("job %d was interrupted: %s", record.job, done)
            self.history.interrupted(record, done, pid)
        self.history.settle(time.time())
        await asyncio.to_thread(self.history.flush)
        for record in records:
            self.journal.remove(record.job)

    async def start(self) -> None:
        """Scan the node once, then start the background work."""
        await self.inventory.refresh_images()
        await self.maintenance.reconcile()
        loop = asyncio.get_running_loop()

        def observe() -> None:
            loop.call_soon_threadsafe(
                lambda: self._in_background(self.maintenance.history_changed())
            )

        def listen(event: events.Event) -> None:
            loop.call_soon_threadsafe(self._announce, event)

        self.history.observer = observe
        self.history.listener = listen
        self.history.event(events.Event("phosd", self.version, f"phosd {self.version} begins"))
        self.periodic.start()
        await self.own_checkpoints.start()
        await self.runtime_checkpoints.start()
        await self.pools.start()
        self.pools.obey(self.config.pools)
        await self.sleepers.start()
        self._in_background(self.inventory.watch())
        self._in_background(self.inventory.sample())
        self._in_background(self.maintenance.go_on())
        self._in_background(self.maintenance.durability.go_on())
        self._in_background(self.analyses.go_on())
        if self.config.metrics:
            self._metrics = self._open_metrics()

    async def close(self) -> None:
        """Cancel the jobs and wait until every program runs again."""
        await self.pools.close()
        await self.sleepers.close()
        await self.periodic.close()
        await self.own_checkpoints.stop_listening()
        await self.runtime_checkpoints.stop_listening()
        await self.jobs.close()
        await self.own_checkpoints.close()
        await self.runtime_checkpoints.close()
        await self.maintenance.durability.close()
        self.history.observer = None
        self.history.listener = None
        if self._metrics is not None:
            await self._metrics.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.inventory.close()
        self.analyses.close()
        self.query_pool.close()

    def reconfigure(self, new: Config) -> list[str]:
        """Apply the settings that can change while phosd runs; return the names of changed settings
        that need a restart.
        """
        fixed = [
            f.name
            for f in msgspec.structs.fields(Config)
            if f.name not in _CHANGEABLE and getattr(new, f.name) != getattr(self.config, f.name)
        ]
        changed = {name: getattr(new, name) for name in _CHANGEABLE}
        self.config = msgspec.structs.replace(self.config, **changed)
        self.periodic.rules = self.config.periodic
        self.jobs.set_limits(self.config.job_limits)
        self.engine.limit(self.config.disk_limits)
        self.maintenance.config = self.config
        self.pools.obey(self.config.pools)
        self.maintenance.forget_old()
        self._in_background(self.maintenance.delete_old())
        return fixed

    async def publish_results(self, job: Job) -> None:
        """Bring what a job has changed to the bus, before its state says that it has ended. If that
        fails or takes long, the job ends all the same, and the next scan makes up for it.
        """
        if job.task.operation in _URGENT:
            return
        of_images = job.task.operation in _OF_IMAGES
        look = self.inventory.refresh_images if of_images else self.inventory.look_again
        try:
            async with asyncio.timeout(_RESULTS_SECONDS):
                await look()
        except Exception as error:
            _log.warning("what job %d has changed is not on the bus yet: %r", job.number, error)

    def job_ended(self, job: Job) -> None:
        """Count an ended job and start the work that follows its end."""
        if self._metrics is not None:
            self._metrics.ended(job)
        self.tree.signal(ROOT, "JobRemoved", job_path(job), str(job.state))
        self._in_background(self._after(job))

    async def _after(self, job: Job) -> None:
        if job.task.operation in _OF_IMAGES:
            await self.maintenance.look_for_damage()
        if job.task.operation in ("checkpoint", *_URGENT):
            try:
                await self.inventory.refresh_processes()  # whose hook answers again
            except (PhosError, OSError) as error:  # the next scan tells it, too
                _log.debug("processes cannot be listed: %s", error)
        if job.task.operation in _ADD_IMAGES:
            await self.maintenance.delete_old()
        if not self.jobs.running:
            await self.maintenance.compact()

    def _announce(self, event: events.Event) -> None:
        """Signal an event to everybody on the bus, without its subject: callers who may see it call
        ``ListEvents``.
        """
        self.tree.signal(ROOT, "EventNew", str(event.severity), event.kind)

    def _open_metrics(self) -> "Metrics":
        try:
            from phosd.service.api.gauges import Sources
            from phosd.service.api.metrics import Metrics
        except ImportError as error:
            packaged = "apt install python3-prometheus-client"
            way = installation.how_to_get("metrics", packaged=packaged)
            raise Unsupported(
                f"`metrics` is set, and a Python package for it is missing ({error.name})",
                hint=f"install it ({way}), or leave `metrics` out of phosd.toml",
                reason=Reason.MISSING_PACKAGE,
            ) from error
        config, troubles = lambda: self.config, lambda: self.maintenance.troubles
        sources = Sources(self.jobs, self.inventory, config, troubles, self.pools.counts)
        return Metrics(self.config.metrics, sources)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        def done(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and task.exception() is not None:
                _log.error("work in the background failed", exc_info=task.exception())

        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(done)


MANAGER_READERS: Mapping[str, Callable[[Manager], object]] = {
    "Version": lambda manager: manager.version,
    "Features": lambda _: list(features()),
    "GPUs": lambda manager: sorted(manager.inventory.gpus),
    "Troubles": lambda manager: manager.maintenance.troubles,
}
