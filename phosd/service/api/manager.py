"""What ``org.phos.Manager1`` does: who may do what, and the jobs that do it."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from phosd import __version__
from phosd.bus import ROOT, Connection
from phosd.engine.image.manifest import Manifest
from phosd.engine.job.affected import AffectedSet, InterruptedJob
from phosd.engine.job.journal import JobRecord, Journal
from phosd.engine.job.progress import Progress
from phosd.engine.operations.checkpoint import MODES
from phosd.engine.system.procfs import boot_id
from phosd.errors import ImageCorrupt, PhosError, Unsupported
from phosd.service.api.inventory import Inventory
from phosd.service.api.listing import Lists
from phosd.service.api.maintenance import Upkeep
from phosd.service.api.moves import OPERATIONS, Moves
from phosd.service.api.object_interfaces import job_interface
from phosd.service.api.object_methods import Details
from phosd.service.api.views import job_path
from phosd.service.config import Config
from phosd.service.dbus.caller import Caller
from phosd.service.dbus.object_tree import ObjectTree
from phosd.service.dbus.polkit import Action, Rights
from phosd.service.dbus.query_pool import Readers
from phosd.service.history import events
from phosd.service.history.history import History
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.options import (
    CheckpointRequest,
    JobOptions,
    Options,
    RestoreRequest,
    parse_options,
)
from phosd.service.jobs.table import Job, JobTable, Listener, Outcome, Task
from phosd.service.process_identity import Target, identify, require_same
from phosd.service.samples import Samples
from phosd.service.tasks.checkpoints import Checkpoints, claim_of, require_possible
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
NO_JOB = "/"
"""Instead of a job's path, when a call ends a schedule."""
_CHANGEABLE = ("retention_days", "periodic", "limits", "max_jobs", "jobs_per_gpu", "min_free")
"""Settings that are taken over while phosd runs."""
_log = logging.getLogger(__name__)


if TYPE_CHECKING:
    from phosd.service.api.metrics import Metrics


class Manager:
    """The daemon behind the bus. To be used on the event loop."""

    version = __version__
    features = (*FEATURES, *(f"mode-{mode}" for mode in MODES if mode != "auto"))

    def __init__(
        self, config: Config, engine: Engine, connection: Connection, history: History
    ) -> None:
        self.config = config
        self._engine = engine
        self._history = history
        self._journal = Journal(config.runtime_dir / "journal")
        self._rights = Rights(connection)
        self.tree = ObjectTree(connection, self._rights.inspects)
        listener = Listener(
            self._started, self._moved, self._progressed, self._ended, self._forgotten
        )
        self.jobs = JobTable(listener, history.next_job(), config.job_limits)
        self._checkpoints = Checkpoints(
            engine,
            history,
            self.jobs,
            self._write_down,
            lambda pid: self.inventory.gpus_of(pid),
        )
        self._periodic = Periodic(
            self._checkpoints,
            self.jobs,
            history,
            config.periodic,
            lambda target: self.inventory.renew(target.pid),
            lambda target: self.inventory.suspended(target.pid),
        )
        self._job_interface = job_interface(self._cancel)
        # Who asks for much of the past, or a slow program, does not delay looks at the present.
        self._readers = Readers()
        samples = Samples()
        details = Details(engine, history, self._rights, self._readers, samples)
        self.inventory = Inventory(
            config, engine, self.tree, history, self._periodic, details, samples
        )
        self.lists = Lists(self.inventory, self.jobs, history, self._rights, self._readers)
        self.moves = Moves(
            engine, self.jobs, self.inventory, self._rights, self._readers, self._write_down
        )
        self.upkeep = Upkeep(
            config,
            engine,
            history,
            self.jobs,
            self.inventory,
            self._periodic,
            lambda: self.tree.changed(ROOT),
        )
        self._metrics: Metrics | None = None
        self._background: set[asyncio.Task[None]] = set()

    async def settle(self) -> None:
        """Before anybody is served: settle what an earlier phosd did not end. What cannot be
        settled stays in the journal for the next start; the other processes are served.
        """
        records = self._journal.interrupted()
        here = [InterruptedJob(r.job, r.affected) for r in records if r.boot_id == boot_id()]
        try:
            said = await asyncio.to_thread(self._engine.settle, here)
        except (PhosError, OSError) as error:
            _log.error("what an earlier phosd left is not settled: %s; see `phos doctor`", error)
            return
        for record in records:
            done = said.get(record.job, "the machine was started anew, so its processes are gone")
            _log.warning("job %d was interrupted: %s", record.job, done)
            self._history.interrupted(record, done)
        self._history.settle(time.time())
        await asyncio.to_thread(self._history.flush)
        for record in records:
            self._journal.remove(record.job)

    async def start(self) -> None:
        """Look at the node once, then keep looking."""
        await self.inventory.refresh_images()
        await self.upkeep.reconcile()
        loop = asyncio.get_running_loop()

        def observe() -> None:
            loop.call_soon_threadsafe(lambda: self._in_background(self.upkeep.history_changed()))

        def listen(event: events.Event) -> None:
            loop.call_soon_threadsafe(self._announce, event)

        self._history.observer = observe
        self._history.listener = listen
        self._history.event(events.Event("phosd", self.version, f"phosd {self.version} begins"))
        self._periodic.start()
        self._in_background(self.inventory.watch())
        self._in_background(self.inventory.sample())
        self._in_background(self.upkeep.go_on())
        if self.config.metrics:
            self._metrics = self._open_metrics()

    async def close(self) -> None:
        """Cancel the jobs and wait until every program runs again."""
        await self._periodic.close()
        await self.jobs.close()
        self._history.observer = None
        self._history.listener = None
        if self._metrics is not None:
            await self._metrics.close()
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.inventory.close()
        self._readers.close()

    def reconfigure(self, new: Config) -> list[str]:
        """Take over what can change while phosd runs; the names of what cannot."""
        fixed = [
            f.name
            for f in dataclasses.fields(Config)
            if f.name not in _CHANGEABLE and getattr(new, f.name) != getattr(self.config, f.name)
        ]
        changed = {name: getattr(new, name) for name in _CHANGEABLE}
        self.config = dataclasses.replace(self.config, **changed)
        self._periodic.rules = self.config.periodic
        self.jobs.set_limits(self.config.job_limits)
        self._engine.limit(self.config.disk_limits)
        self.upkeep.config = self.config
        self.upkeep.forget_old()
        self._in_background(self.upkeep.delete_old())
        return fixed

    # The methods of Manager1. Each gets the caller, the object (this one), then its arguments.

    async def checkpoint(
        self, caller: Caller, _: "Manager", pid: int, options: dict[str, Any]
    ) -> list[Any]:
        request = parse_options(options, CheckpointRequest)
        require_possible(request)
        target = identify(pid)
        acting = await self._may(caller, Action.CHECKPOINT, target)
        if request.parent not in ("", "auto"):
            await self._image_for(caller, Action.CHECKPOINT, request.parent)
        if request.every == 0:
            self._periodic.end(target, caller.uid)
            return [NO_JOB]
        begin = self._periodic.begin if request.every else self._checkpoints.start
        return [job_path(begin(target, request, caller.uid, acting=acting))]

    async def restore(
        self, caller: Caller, _: "Manager", image: str, options: dict[str, Any]
    ) -> list[Any]:
        request = parse_options(options, RestoreRequest)
        manifest, acting = await self._image_for(caller, Action.RESTORE, image)
        gpus = frozenset(gpu.ordinal for gpu in manifest.gpus)

        def work(progress: Progress) -> Outcome:
            pid = self._engine.restore(image, request, acting, progress)
            return Outcome(str(pid), "eager")

        return [self._image_job("restore", caller, image, request.token, work, gpus)]

    async def verify_image(
        self, caller: Caller, _: "Manager", image: str, options: dict[str, Any]
    ) -> list[Any]:
        request = parse_options(options, JobOptions)
        manifest, _acting = await self._image_for(caller, Action.VERIFY, image)

        def work(progress: Progress) -> Outcome:
            whole = None
            try:
                self._engine.verify(image, progress)
                whole = True
            except ImageCorrupt:
                whole = False
                raise
            finally:
                self._history.image(manifest, whole)
                self._history.flush()  # what the image's object tells comes from there
            return Outcome(image)

        return [self._image_job("verify", caller, image, request.token, work)]

    async def delete_image(
        self, caller: Caller, _: "Manager", image: str, options: dict[str, Any]
    ) -> list[Any]:
        parse_options(options, Options)
        owner = None
        try:
            manifest, _acting = await self._image_for(caller, Action.DELETE, image)
            owner = manifest.owner
        except ImageCorrupt:
            if caller.uid != 0:  # whose it was is not known any more
                raise

        def work(_: Progress) -> Outcome:
            self._engine.delete_image(image)
            self._history.image_deleted(image, f"uid {caller.uid} asked for it", owner)
            return Outcome(image)

        claims = frozenset((f"image {image}",))
        task = Task("delete", image, caller.uid, claims, work, short=True)
        await self._to_the_end(self.jobs.submit(task, self._write_down))
        return []

    async def recover(
        self, caller: Caller, _: "Manager", pid: int, options: dict[str, Any]
    ) -> list[Any]:
        parse_options(options, Options)
        target = identify(pid)
        await self._may(caller, Action.RECOVER, target)

        def work(_: Progress) -> Outcome:
            require_same(target)
            return Outcome(self._engine.recover(pid))

        task = Task("recover", str(pid), caller.uid, frozenset((claim_of(pid),)), work)
        # It looks before each step, so nobody has to set it right if it is not ended.
        job = self.jobs.submit(task, lambda _: None)
        try:
            await self._to_the_end(job)
        finally:
            await self.inventory.refresh_processes()
        return [job.outcome.result]

    async def _cancel(self, caller: Caller, job: Job, options: dict[str, Any]) -> list[Any]:
        parse_options(options, Options)
        number = job.number
        await self._rights.require(
            caller, Action.CANCEL, job.task.owner, f"job {number}", job=str(number)
        )
        self.jobs.cancel(job)
        return []

    # How jobs begin and end.

    async def _to_the_end(self, job: Job) -> None:
        """Wait for a job; raise what ended it."""
        await self.jobs.wait(job)
        if job.error is not None:
            raise job.error

    async def _may(self, caller: Caller, action: Action, target: Target) -> int:
        """The user id whose rights count for what the caller wants to do with a process."""
        pid = target.pid
        return await self._rights.require(
            caller, action, target.uid, f"process {pid}", pid=str(pid)
        )

    async def _image_for(self, caller: Caller, action: Action, image: str) -> tuple[Manifest, int]:
        """The image, if the caller may use it: what is in it runs as its owner. With it, the user
        id whose rights count.
        """
        manifest = await asyncio.to_thread(self._engine.image, image)
        acting = await self._rights.require(
            caller, action, manifest.owner, f"image {image}", image=image
        )
        return manifest, acting

    def _image_job(
        self,
        operation: str,
        caller: Caller,
        image: str,
        token: str,
        work: Callable[[Progress], Outcome],
        gpus: frozenset[int] = frozenset(),
    ) -> str:
        claims = frozenset((f"image {image}",))
        task = Task(operation, image, caller.uid, claims, work, token=token, gpus=gpus)
        return job_path(self.jobs.submit(task, self._write_down))

    def _write_down(self, job: Job, target: Target | None = None) -> None:
        record = JobRecord(
            job=job.number,
            operation=job.task.operation,
            target=job.task.target,
            owner=job.task.owner,
            started=job.started,
            boot_id=boot_id(),
            pid=target.pid if target else None,
            start_time=target.start_time if target else None,
        )
        self._journal.write(record)

        def write(affected: AffectedSet) -> None:
            self._journal.write(msgspec.structs.replace(record, affected=affected))

        job.progress.recorder = write

    def _started(self, job: Job) -> None:
        self._history.job(job)
        self.tree.publish(job_path(job), self._job_interface, job, job.task.owner)
        self.tree.signal(ROOT, "JobNew", job_path(job))

    def _moved(self, job: Job) -> None:
        """It begins after it had to wait, or waits again."""
        self._history.job(job)
        assert job.progress.observer is not None
        job.progress.observer(job.progress)  # which tells of it, and not too often

    def _progressed(self, job: Job) -> None:
        self.tree.changed(job_path(job))

    def _ended(self, job: Job) -> None:
        if self._metrics is not None:
            self._metrics.ended(job)
        self._history.job(job)
        for event in events.of_end(job):
            self._history.event(event)
        self._journal.remove(job.number)
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

    def _forgotten(self, job: Job) -> None:
        self.tree.withdraw(job_path(job))

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
