"""Keep the bus objects of processes, images and GPUs in step with the node."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path

from phosd.bus import ROOT
from phosd.engine.hook_client import places
from phosd.engine.image.called import Called
from phosd.engine.image.usage import SharedChunks
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.program.process import GpuProcess
from phosd.engine.system.procfs import ProcessId, boot_id
from phosd.errors import PhosError
from phosd.service.api.object_interfaces import ObjectInterfaces
from phosd.service.api.views import ImageView, ProcessView, gpu_path, image_path, process_path
from phosd.service.config import Config
from phosd.service.dbus.object_tree import ObjectTree
from phosd.service.history.events import Event, Severity
from phosd.service.history.history import History
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.job import Subject
from phosd.service.process_identity import Target, ancestors, held_by, key_of
from phosd.service.samples import PERIOD, Samples
from phosd.service.tasks.periodic import Periodic
from phosd.service.tasks.pools import Pools
from phosd.service.tasks.sleepers import Sleepers

_POLL_SECONDS = 0.25
_log = logging.getLogger(__name__)


class _Look:
    """A scan of the node, shared by all callers that asked before it began."""

    def __init__(self, one_at_a_time: asyncio.Lock, look: Callable[[], Awaitable[None]]) -> None:
        self._one_at_a_time = one_at_a_time
        self._look = look
        self._asked: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self) -> None:
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_task(self._run())
            self._tasks.add(self._asked)
            self._asked.add_done_callback(self._over)
        await asyncio.shield(self._asked)

    async def _run(self) -> None:
        async with self._one_at_a_time:
            self._asked = None
            await self._look()

    def _over(self, look: asyncio.Task[None]) -> None:
        self._tasks.discard(look)
        if not look.cancelled():
            look.exception()  # mark as retrieved; the caller, if still there, gets it too

    async def close(self) -> None:
        """Cancel running scans and wait for them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Inventory:
    """The processes, images and GPUs of the last scan. Use it on the event loop only; another
    thread may copy :attr:`processes`, :attr:`views` and :attr:`images`.
    """

    def __init__(
        self,
        config: Config,
        engine: Engine,
        tree: ObjectTree,
        history: History,
        periodic: Periodic,
        sleepers: Sleepers,
        pools: Pools,
        interfaces: ObjectInterfaces,
        samples: Samples,
    ) -> None:
        self._config = config
        self._engine = engine
        self._tree = tree
        self._history = history
        self._periodic = periodic
        self._sleepers = sleepers
        self._pools = pools
        self._interfaces = interfaces
        looking = asyncio.Lock()
        self.refresh_processes = _Look(looking, self._look_for_processes)
        self.refresh_images = _Look(looking, self._look_for_images)
        # A slow scan of processes must not delay that of GPUs.
        self.refresh_gpus = _Look(asyncio.Lock(), self._look_for_gpus)
        self._troubles: dict[str, str] = {}
        self._samples = samples
        self._seen_gpus = -math.inf
        self.processes: dict[str, GpuProcess] = {}
        self.views: dict[str, ProcessView] = {}
        """What is told of each of these processes."""
        self.images: dict[str, ImageView] = {}
        self._shared_chunks = SharedChunks()
        self._last_image: dict[ProcessId, str] = {}
        """The latest image of each process: there may be many of both."""
        self.gpus: dict[str, GpuInfo] = {}

    def knows(self, target: Target) -> bool:
        """Return whether the last scan has found this process of this user."""
        return any(
            (each.id, each.uid) == (target.id, target.uid) for each in self.processes.values()
        )

    async def watch(self) -> None:
        """Scan for processes and images every few seconds, and at once when a hook socket appears
        or disappears.
        """
        images = self._config.state_dir / "images"
        seen_images = _stamp(images)
        await self._try("GPUs", self.refresh_gpus)  # needed for the processes' GPU paths
        while True:
            seen_hooks = self._hooks_seen()
            await self._try("processes", self.refresh_processes)
            if seen_images != (now := _stamp(images)):
                seen_images = now
                await self._try("images", self.refresh_images)
            for _ in range(int(self._config.rescan_seconds / _POLL_SECONDS)):
                await asyncio.sleep(_POLL_SECONDS)
                if self._hooks_seen() != seen_hooks:
                    break

    def _hooks_seen(self) -> list[int]:
        """Return a value that changes whenever a hook's socket appears or disappears."""
        return [*map(_stamp, places.folders(self._config.runtime_dir))]

    async def sample(self) -> None:
        """Sample the GPUs periodically."""
        while True:
            await self._try("GPUs", self.refresh_gpus)
            await asyncio.sleep(PERIOD)

    async def _try(self, what: str, look: Callable[[], Awaitable[None]]) -> None:
        """Run a scan. Log a failure once for each reason; the next scan tries again."""
        text = ""
        try:
            await look()
        except PhosError as error:
            text = str(error)
            if self._troubles.get(what) != text:
                _log.warning("cannot look for %s: %s", what, text)
                self._history.event(Event("looking", what, text, Severity.WARNING))
        except Exception as error:  # whatever it was, the next scan may succeed
            text = repr(error)
            if self._troubles.get(what) != text:
                _log.exception("looking for %s failed", what)
                self._history.event(Event("looking", what, text, Severity.ERROR))
        self._troubles[what] = text

    async def _look_for_processes(self) -> None:
        """Publish new GPU processes and withdraw ended ones."""
        found = await asyncio.to_thread(self._engine.processes)
        current = {process_path(p): p for p in found}
        for path in self.processes.keys() - current.keys():
            self._tree.withdraw(path)
            self._tree.signal(ROOT, "ProcessRemoved", path)
        views = {path: self._view(process) for path, process in current.items()}
        for path, view in views.items():
            if path in self.processes:
                self._tree.replace(path, view)
                continue
            self._tree.publish(path, self._interfaces.process, view, view.process.uid)
            self._tree.signal(ROOT, "ProcessNew", path)
        gone = self.processes.keys() - current.keys()
        self.processes, self.views = current, views
        if gone:
            self._periodic.forget_gone()
        self._periodic.consider(found)

    async def _look_for_images(self) -> None:
        """Publish new images, withdraw deleted ones, and update their properties."""
        in_memory = {*await asyncio.to_thread(self._engine.in_memory)}
        manifests = await asyncio.to_thread(self._engine.images)
        notes = await asyncio.to_thread(self._engine.notes)
        verified = await asyncio.to_thread(self._history.verified)
        rehearsed = await asyncio.to_thread(self._history.rehearsed)
        crashes = await asyncio.to_thread(self._history.crashes)
        shared = await asyncio.to_thread(self._shared_chunks.of, manifests)
        current = {}
        for manifest, chunks in zip(manifests, shared, strict=True):
            path = image_path(manifest.id)
            new = ImageView(
                manifest,
                *verified.get(manifest.id, (0.0, False)),
                shared=chunks,
                in_memory=manifest.id in in_memory,
                note=notes.get(manifest.id, ""),
                rehearsed=rehearsed.get(manifest.id, (0.0, "")),
                crashes=crashes.get(manifest.id, 0),
            )
            current[path] = self._known(path, new)
        for path in self.images.keys() - current.keys():
            self._tree.withdraw(path)
            self._tree.signal(ROOT, "ImageRemoved", path)
        for path, image in current.items():
            if path in self.images:
                self._tree.replace(path, image)
                continue
            self._tree.publish(path, self._interfaces.image, image, image.manifest.owner)
            self._tree.signal(ROOT, "ImageNew", path)
        self.images = current
        boot = boot_id()
        self._last_image = {
            process: image.manifest.id
            for image in sorted(current.values(), key=lambda image: image.manifest.id)
            for process in held_by(image.manifest, boot)
        }
        for process in self.processes.values():
            self.renew(process.pid)

    def _known(self, path: str, new: ImageView) -> ImageView:
        """Return the existing view, which caches its sizes, unless something has changed."""
        known = self.images.get(path)
        if known is None:
            return new
        return known if replace(new, manifest=known.manifest) == known else new

    async def look_again(self) -> None:
        """Look for processes, and for GPUs whatever the sampling period: a job has moved something,
        and which processes a GPU reports decides where they are.
        """
        self._seen_gpus = -math.inf
        await self.refresh_gpus()
        await self.refresh_processes()

    async def _look_for_gpus(self) -> None:
        """Publish the GPUs, with figures no older than one sampling period."""
        if time.monotonic() - self._seen_gpus < 0.99 * PERIOD:
            return
        found = await asyncio.to_thread(self._engine.gpus)
        current = {gpu_path(gpu.uuid): gpu for gpu in found}
        for path in self.gpus.keys() - current.keys():
            self._tree.withdraw(path)
        for path, gpu in current.items():
            if path in self.gpus:
                self._tree.replace(path, gpu)
            else:
                self._tree.publish(path, self._interfaces.gpu, gpu, None)
        self._seen_gpus = time.monotonic()
        self._samples.take(found, time.time())
        listed_anew = self.gpus.keys() != current.keys()
        used_anew = _users(self.gpus) != _users(current)
        self.gpus = current
        if used_anew:
            for path, process in self.processes.items():
                self._tree.replace(path, self._view(process))
        if listed_anew:
            self._tree.changed(ROOT)

    async def close(self) -> None:
        """Stop all scans."""
        for look in (self.refresh_processes, self.refresh_images, self.refresh_gpus):
            await look.close()

    def process(self, pid: int) -> str | None:
        """Return the path of the GPU process with this pid."""
        return next((path for path, p in self.processes.items() if p.pid == pid), None)

    def tree(self, pid: int) -> list[GpuProcess]:
        """Return the GPU processes of the last scan that are this one or below it."""
        return [each for each in self.processes.values() if pid in ancestors(each.pid)]

    def subject(self, pid: int) -> Subject:
        """Return what was known at the last scan of a process and its descendants."""
        tree = {process.pid: process for process in self.tree(pid)}
        by_memory = {gpu for process in tree.values() for gpu in process.gpus}
        by_driver = {gpu.ordinal for gpu in self.gpus.values() if tree.keys() & set(gpu.pids)}
        called = next((process.called for process in tree.values()), Called())
        return Subject(called, frozenset(by_memory | by_driver))

    def suspended(self, pid: int) -> bool:
        """Whether a process or a descendant was suspended at the last scan."""
        there = self.processes.values()
        return any(p.state == "suspended" and pid in ancestors(p.pid) for p in there)

    def renew(self, pid: int) -> None:
        """Update the bus object of a process that has changed."""
        path = self.process(pid)
        if path is not None:
            self.views[path] = self._view(self.processes[path])
            self._tree.replace(path, self.views[path])

    def _view(self, process: GpuProcess) -> ProcessView:
        process_id = ProcessId(process.pid, process.start_time)
        gpus = tuple(
            gpu.uuid
            for gpu in sorted(self.gpus.values(), key=lambda gpu: gpu.ordinal)
            if gpu.ordinal in process.gpus or process.pid in gpu.pids
        )
        schedule = self._periodic.of(process.pid, process.start_time)
        every, keep = (schedule.every, schedule.keep) if schedule else (0.0, 0)
        last = self._last_image.get(process_id, "") or self._restored_from(process.pid)
        sleeper, in_pool = self._sleepers.of(process_id), self._pools.place_of(process.pid)
        return ProcessView(process, last, gpus, every, keep if every else 0, sleeper, *in_pool)

    def _restored_from(self, pid: int) -> str:
        """Return the image that the program of a process was restored from; empty: none."""
        if self._history.restored:
            for each in ancestors(pid):
                image = self._history.restored.get(key_of(each))
                if image and image_path(image) in self.images:
                    return image
        return ""


def _users(gpus: Mapping[str, GpuInfo]) -> dict[str, tuple[int, ...]]:
    """Return the processes that use each GPU, which tell where those without a hook are."""
    return {path: gpu.pids for path, gpu in gpus.items()}


def _stamp(folder: Path) -> int:
    """Return a value that changes whenever an entry of the folder is added or removed."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
