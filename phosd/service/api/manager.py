"""The daemon behind the bus: how it begins and ends, and what it sees to meanwhile."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from phosd import __version__
from phosd.bus import ROOT
from phosd.engine.job.affected import InterruptedJob
from phosd.engine.job.journal import Journal
from phosd.engine.operations.checkpoint import MODES
from phosd.engine.system.procfs import boot_id
from phosd.errors import PhosError, Unsupported
from phosd.service.api.inventory import Inventory
from phosd.service.api.maintenance import Upkeep
from phosd.service.api.moves import OPERATIONS
from phosd.service.api.views import job_path
from phosd.service.config import Config
from phosd.service.dbus.object_tree import ObjectTree
from phosd.service.dbus.query_pool import Readers
from phosd.service.dbus.spec import Event, Interface, Property, methods_of
from phosd.service.history import events
from phosd.service.history.history import History
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.table import Job, JobTable
from phosd.service.tasks.periodic import Periodic

FEATURES = (
    "checkpoint",
    "restore",
    "verify",
    "queue",
    "periodic",
    "process-blocks",
    "process-kernels",
    "process-log",
    "image-blocks",
    "history-filters",
    "events",
    "gpu-samples",
    "recover",
    "migrate",
    "suspend",
    "resume",
    "swap",
    "evacuate",
    "release-cached",
)
_CHANGEABLE = ("retention_days", "periodic", "limits", "max_jobs", "jobs_per_gpu", "min_free")
"""Settings that are taken over while phosd runs."""
_log = logging.getLogger(__name__)


if TYPE_CHECKING:
    from phosd.service.api.metrics import Metrics


@dataclass(eq=False)
class Manager:
    """What the object of ``org.phos.Manager1`` is about. To be used on the event loop."""

    version = __version__
    features = (*FEATURES, *(f"mode-{mode}" for mode in MODES if mode != "auto"))

    config: Config
    engine: Engine
    history: History
    journal: Journal
    tree: ObjectTree
    jobs: JobTable
    periodic: Periodic
    readers: Readers
    inventory: Inventory
    upkeep: Upkeep
    _metrics: "Metrics | None" = field(default=None, init=False)
    _background: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    async def settle(self) -> None:
        """Before anybody is served: settle what an earlier phosd did not end. What cannot be
        settled stays in the journal for the next start; the other processes are served.
        """
        records = self.journal.interrupted()
        here = [InterruptedJob(r.job, r.affected) for r in records if r.boot_id == boot_id()]
        try:
            said = await asyncio.to_thread(self.engine.settle, here)
        except (PhosError, OSError) as error:
            _log.error("what an earlier phosd left is not settled: %s; see `phos doctor`", error)
            return
        for record in records:
            done = said.get(record.job, "the machine was started anew, so its processes are gone")
            _log.warning("job %d was interrupted: %s", record.job, done)
            self.history.interrupted(record, done)
        self.history.settle(time.time())
        await asyncio.to_thread(self.history.flush)
        for record in records:
            self.journal.remove(record.job)

    async def start(self) -> None:
        """Look at the node once, then keep looking."""
        await self.inventory.refresh_images()
        await self.upkeep.reconcile()
        loop = asyncio.get_running_loop()

        def observe() -> None:
            loop.call_soon_threadsafe(lambda: self._in_background(self.upkeep.history_changed()))

        def listen(event: events.Event) -> None:
            loop.call_soon_threadsafe(self._announce, event)

        self.history.observer = observe
        self.history.listener = listen
        self.history.event(events.Event("phosd", self.version, f"phosd {self.version} begins"))
        self.periodic.start()
        self._in_background(self.inventory.watch())
        self._in_background(self.inventory.sample())
        self._in_background(self.upkeep.go_on())
        if self.config.metrics:
            self._metrics = self._open_metrics()

    async def close(self) -> None:
        """Cancel the jobs and wait until every program runs again."""
        await self.periodic.close()
        await self.jobs.close()
        self.history.observer = None
        self.history.listener = None
        if self._metrics is not None:
            await self._metrics.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.inventory.close()
        self.readers.close()

    def reconfigure(self, new: Config) -> list[str]:
        """Take over what can change while phosd runs; the names of what cannot."""
        fixed = [
            f.name
            for f in dataclasses.fields(Config)
            if f.name not in _CHANGEABLE and getattr(new, f.name) != getattr(self.config, f.name)
        ]
        changed = {name: getattr(new, name) for name in _CHANGEABLE}
        self.config = dataclasses.replace(self.config, **changed)
        self.periodic.rules = self.config.periodic
        self.jobs.set_limits(self.config.job_limits)
        self.engine.limit(self.config.disk_limits)
        self.upkeep.config = self.config
        self.upkeep.forget_old()
        self._in_background(self.upkeep.delete_old())
        return fixed

    def job_ended(self, job: Job) -> None:
        """See to what follows the end of a job."""
        if self._metrics is not None:
            self._metrics.ended(job)
        self._in_background(self._announce_end(job))

    async def _announce_end(self, job: Job) -> None:
        """What a job made, or changed, is on the bus before its end is told, and old images go
        after it.
        """
        try:
            if job.task.operation in OPERATIONS:
                await self.inventory.refresh_processes()
            elif job.task.operation != "restore":
                await self.inventory.refresh_images()
                await self.upkeep.look_for_damage()
        finally:
            self.tree.signal(ROOT, "JobRemoved", job_path(job), str(job.state))
        if job.task.operation == "checkpoint":
            await self.upkeep.delete_old()
        if not self.jobs.running:
            await self.upkeep.compact()

    def _announce(self, event: events.Event) -> None:
        """Everybody hears it: what it is about is told to those who ask for it."""
        self.tree.signal(ROOT, "EventNew", str(event.severity), event.kind)

    def _open_metrics(self) -> "Metrics":
        try:
            from phosd.service.api.metrics import Metrics
        except ImportError as error:
            raise Unsupported(
                f"`metrics` is set, and a Python package for it is missing ({error.name})",
                hint="install prometheus-client (`pip install 'phosd[metrics]'`, or the package "
                "python3-prometheus-client), or leave `metrics` out of phosd.toml",
            ) from error
        return Metrics(self.config.metrics, self.jobs, self.inventory)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        def done(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and task.exception() is not None:
                _log.error("work in the background failed", exc_info=task.exception())

        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(done)


def manager_interface(*handlers: object) -> Interface:
    """``org.phos.Manager1``, answered by these handlers, or described from their classes.

    Every method that starts work gives a job at once; options that are not known are errors.
    """
    return Interface(
        "org.phos.Manager1",
        "GPU processes of this node: saved, restored, watched.",
        methods_of(*handlers),
        (
            Property("Version", "s", "The version of phosd.", lambda m: m.version, constant=True),
            Property(
                "Features",
                "as",
                "What this version can do.",
                lambda m: list(m.features),
                constant=True,
            ),
            Property("GPUs", "ao", "The objects of the GPUs.", lambda m: sorted(m.inventory.gpus)),
            Property(
                "Troubles",
                "as",
                "What is wrong with phosd's own surroundings.",
                lambda m: m.upkeep.troubles,
                private=True,
            ),
        ),
        (
            Event("JobNew", (("job", "o"),), "A job was accepted."),
            Event(
                "JobRemoved",
                (("job", "o"), ("result", "s")),
                "A job has ended; result is its state.",
            ),
            Event("ProcessNew", (("process", "o"),), "A process uses a GPU now."),
            Event("ProcessRemoved", (("process", "o"),), "A GPU process has ended."),
            Event("ImageNew", (("image", "o"),), "An image is complete."),
            Event("ImageRemoved", (("image", "o"),), "An image is gone."),
            Event(
                "EventNew",
                (("severity", "s"), ("kind", "s")),
                "Something happened; ListEvents tells those whom it concerns what.",
            ),
        ),
    )
