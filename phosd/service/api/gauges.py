"""Gauges of the node for Prometheus, read on request in another thread.

Each reader copies what the event loop has found before, and looks at no file: a scrape costs the
same whatever the disk does. Labels are few: users (at most a hundred) and words of the
documentation, never processes, command lines or images.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from phosd import __version__
from phosd.engine.program.away import Away
from phosd.interface.records import Image, Job, Process
from phosd.protection import Program, Protection, programs
from phosd.service.api.image_sizes import ImageSizes
from phosd.service.api.inventory import Inventory
from phosd.service.api.views import ImageView, ProcessView, created, image_path, job_path, suspended
from phosd.service.config import Config
from phosd.service.jobs.job import Job as ServiceJob
from phosd.service.jobs.limits import limits_of
from phosd.service.jobs.pool import PoolCounts
from phosd.service.jobs.table import JobTable

_MOST_USERS = 100
"""Most users with labels of their own."""
_OF_PROGRAMS = tuple(each for each in Protection if each.counts)
_WHERE = ("memory", "disk")
_DISK_SECONDS = 10.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Sources:
    """What the gauges are read from."""

    jobs: JobTable
    inventory: Inventory
    config: Callable[[], Config]
    troubles: Callable[[], Sequence[str]]
    pools: Callable[[], PoolCounts] = PoolCounts
    disk: os.statvfs_result | None = field(default=None, init=False)
    """The file system of the images, as it was a moment ago; None if it could not be asked."""

    async def watch_disk(self) -> None:
        """Look at the file system every few seconds: one that hangs must not hold up a scrape."""
        while True:
            try:
                self.disk = await asyncio.to_thread(os.statvfs, self.config().state_dir)
            except OSError:
                self.disk = None
            await asyncio.sleep(_DISK_SECONDS)


def register(registry: CollectorRegistry, sources: Sources) -> None:
    """Add all gauges to a registry."""
    for name, text, read in _single(sources):
        Gauge(name, text, registry=registry).set_function(read)
    version = Gauge("phosd_build_info", "The version that runs.", ("version",), registry=registry)
    version.labels(__version__).set(1)
    for kind in (_Programs, _Suspended, _Pools, _Images, _Disk):
        registry.register(kind(sources))


def _single(sources: Sources) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """Yield the gauges that are one number: name, description, reader."""
    jobs, inventory = sources.jobs, sources.inventory

    def states() -> Counter[str]:
        return Counter(process.state for process in tuple(inventory.processes.values()))

    yield "phosd_jobs_waiting", "Jobs in the queue.", lambda: jobs.waiting
    yield "phosd_jobs_running", "Jobs that run.", lambda: jobs.running
    yield "phosd_processes", "GPU processes.", lambda: len(inventory.processes)
    yield "phosd_processes_parked", "GPU processes that are parked.", lambda: states()["parked"]
    yield (
        "phosd_processes_suspended",
        "GPU processes that are off their GPUs.",
        lambda: states()["suspended"],
    )
    yield "phosd_images", "Images.", lambda: len(inventory.images)
    yield (
        "phosd_images_in_memory",
        "Images that are not on the disk yet: a reboot loses them.",
        lambda: sum(view.in_memory for view in tuple(inventory.images.values())),
    )
    yield (
        "phosd_troubles",
        "What is wrong without stopping jobs: a history that cannot be written, images that cannot "
        "be read.",
        lambda: len(sources.troubles()),
    )


@dataclass(eq=False)
class _Programs(Collector):
    """How well programs are protected, as ``phos status`` says it to root."""

    sources: Sources

    def collect(self) -> Iterable[GaugeMetricFamily]:
        now = time.time()
        found = self._found(now)
        counts = Counter(each.protection for each in found)
        family = GaugeMetricFamily(
            "phosd_programs",
            "Programs, by how well they are protected: `phos status` names them.",
            labels=("protection",),
        )
        for protection in reversed(_OF_PROGRAMS):
            family.add_metric((str(protection),), counts[protection])
        yield family
        yield GaugeMetricFamily(
            "phosd_most_overdue_seconds",
            "For how long the next checkpoint of a late program has been due, of the one that waits"
            " longest; 0: none is late. What is suspended computes nothing, and does not count.",
            max((each.overdue(now) for each in found if each.state != "suspended"), default=0.0),
        )
        yield GaugeMetricFamily(
            "phosd_programs_nobody_restarts",
            "Programs that only a person would start again if they, or the node, failed.",
            sum(not each.restarter for each in found if each.protection.counts),
        )

    def _found(self, now: float) -> list[Program]:
        views = dict(self.sources.inventory.views)
        return programs(
            [_process_record(path, view) for path, view in views.items()],
            map(_image_record, _latest_images(self.sources.inventory, views.values())),
            map(_job_record, self.sources.jobs.snapshot()),
            now,
        )


@dataclass(eq=False)
class _Suspended(Collector):
    """The suspended programs, and what a reboot would lose of them: it ends them all."""

    sources: Sources

    def collect(self) -> Iterable[GaugeMetricFamily]:
        inventory = self.sources.inventory
        groups = suspended(tuple(inventory.views.values()))
        counts = Counter(away.where for away in groups)
        family = GaugeMetricFamily(
            "phosd_suspended_programs",
            "Suspended programs, by where their device memory is.",
            labels=("where",),
        )
        for where in _WHERE:
            family.add_metric((where,), counts[where])
        yield family
        yield GaugeMetricFamily(
            "phosd_hollow_programs",
            "Those of them whose contexts are on their GPUs.",
            sum(away.hollow for away in groups),
        )
        yield GaugeMetricFamily(
            "phosd_ready_programs",
            "Those of them whose memory is there already, too.",
            sum(away.ready for away in groups),
        )
        yield GaugeMetricFamily(
            "phosd_asleep_programs",
            "Those of them that are resumed when somebody calls them.",
            sum(views[0].sleeper is not None for views in groups.values()),
        )
        yield GaugeMetricFamily(
            "phosd_suspended_unsaved_seconds",
            "For how long a suspended program had run since its newest image on the disk, of the "
            "one that would lose most by a reboot.",
            max((_unsaved(inventory, *each) for each in groups.items()), default=0.0),
        )


@dataclass(eq=False)
class _Pools(Collector):
    """The programs of pools."""

    sources: Sources

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "phosd_pool_programs",
            "Programs of pools: those that wait hollow (`waiting`) or ready, those that were "
            "started, and those that are to wait and could not be made yet.",
            labels=("state",),
        )
        for state, count in self.sources.pools()._asdict().items():
            family.add_metric((state,), count)
        yield family


@dataclass(eq=False)
class _Images(Collector):
    """Stored bytes of users, and their quotas."""

    sources: Sources
    _sizes: ImageSizes = field(default_factory=ImageSizes, init=False)

    def collect(self) -> Iterable[GaugeMetricFamily]:
        sizes = self._sizes.by_user(tuple(self.sources.inventory.images.values()))
        largest = [user for user, _ in sizes.most_common()]
        family = GaugeMetricFamily(
            "phosd_image_bytes", "Stored bytes of a user's images.", labels=("user",)
        )
        for user in largest[:_MOST_USERS]:
            family.add_metric((str(user),), sizes[user])
        if others := largest[_MOST_USERS:]:
            family.add_metric(("others",), sum(sizes[user] for user in others))
        yield family
        for away, views in suspended(tuple(self.sources.inventory.views.values())).items():
            sizes[views[0].process.uid] += away.stored_bytes
        yield from self._quotas(sizes)

    def _quotas(self, used: Counter[int]) -> Iterable[GaugeMetricFamily]:
        """Yield the quotas of those users who have one, with what they have ``used`` of it: those
        who have used most of theirs.
        """
        rules = self.sources.config().limits
        users = {*used, *(rule.user for rule in rules if rule.user is not None)}
        limits = {user: limits_of(rules, user).quota for user in users}
        quotas = {user: quota for user, quota in limits.items() if quota is not None}
        fullest = sorted(quotas, key=lambda user: used[user] / max(1, quotas[user]), reverse=True)
        limit = GaugeMetricFamily(
            "phosd_quota_bytes", "What a user's images may take.", labels=("user",)
        )
        taken = GaugeMetricFamily(
            "phosd_quota_used_bytes",
            "Stored bytes of the images and suspended programs of a user with a quota.",
            labels=("user",),
        )
        for user in fullest[:_MOST_USERS]:
            limit.add_metric((str(user),), quotas[user])
            taken.add_metric((str(user),), used[user])
        yield limit
        yield taken


@dataclass(eq=False)
class _Disk(Collector):
    """The file system of the images."""

    sources: Sources

    def collect(self) -> Iterable[GaugeMetricFamily]:
        size = GaugeMetricFamily("phosd_disk_bytes", "Bytes of the file system of the images.")
        free = GaugeMetricFamily("phosd_disk_free_bytes", "Bytes that are free there.")
        kept = GaugeMetricFamily(
            "phosd_disk_kept_free_bytes",
            "Bytes that checkpoints leave free there (min_free): one that would not is refused.",
        )
        disk, config = self.sources.disk, self.sources.config()
        if disk is not None:
            total = disk.f_blocks * disk.f_frsize
            size.add_metric((), total)
            free.add_metric((), disk.f_bavail * disk.f_frsize)
            kept.add_metric((), config.min_free.of(total))
        yield from (size, free, kept)


def _process_record(path: str, view: ProcessView) -> Process:
    """Return as much of the record as says whether its program is protected."""
    process = view.process
    return Process(
        path,
        pid=process.pid,
        user=process.uid,
        name=process.name,
        state=process.state,
        last_image=view.last_image,
        restarter=process.restarter,
        every=view.every,
        waits=view.waits,
    )


def _image_record(view: ImageView) -> Image:
    image = view.manifest
    return Image(image_path(image.id), id=image.id, created=_made(view))


def _job_record(job: ServiceJob) -> Job:
    task = job.task
    return Job(
        job_path(job),
        number=job.number,
        operation=task.operation,
        target=task.target,
        state=str(job.state),
        error=job.error.code if job.error is not None else "",
    )


def _latest_images(inventory: Inventory, views: Iterable[ProcessView]) -> list[ImageView]:
    """Return the latest images of these processes. There may be far more images."""
    images = inventory.images
    found = (images.get(image_path(each)) for each in {view.last_image for view in views} if each)
    return [image for image in found if image is not None]


def _made(view: ImageView) -> float:
    return created(view.manifest) / 1e6


def _unsaved(inventory: Inventory, away: Away, views: Sequence[ProcessView]) -> float:
    """Return for how long a suspended program had run since its newest image on the disk, or its
    start.
    """
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    began = boot + min(view.process.start_time for view in views) / _TICKS
    durable = (image for image in _latest_images(inventory, views) if not image.in_memory)
    return max(0.0, away.since - max([began, *map(_made, durable)]))
