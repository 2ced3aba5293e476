"""Serve metrics to Prometheus: counters of ended jobs, and gauges of the node.

Labels are operations, states, modes and users; never processes, command lines or images, whose
number is unbounded. This module needs the extra ``metrics`` and is imported only if metrics are
configured.
"""

import asyncio
from collections import Counter as Count
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from phosd.engine.image.manifest import Manifest
from phosd.engine.image.usage import total_bytes
from phosd.errors import Internal
from phosd.service.api.inventory import Inventory
from phosd.service.api.page_server import PageServer
from phosd.service.jobs.job import Job, JobState
from phosd.service.jobs.table import JobTable

_MOST_USERS = 100
"""Most users with labels of their own; the others share one."""
_LAG_SECONDS = 1.0
_STOPS = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_LAGS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class Metrics:
    """Serves metrics over HTTP in a thread of its own. Raises :class:`Internal` when it cannot
    listen.
    """

    def __init__(self, address: str, jobs: JobTable, inventory: Inventory) -> None:
        registry = CollectorRegistry()
        self._jobs = Counter(
            "phosd_jobs", "Jobs that ended.", ("operation", "state"), registry=registry
        )
        self._stops = Histogram(
            "phosd_stop_seconds",
            "How long checkpoints stopped the program.",
            ("mode",),
            buckets=_STOPS,
            registry=registry,
        )
        self._drained = Counter(
            "phosd_drained_bytes", "Device memory that checkpoints saved.", registry=registry
        )
        self._draining = Counter(
            "phosd_drain_seconds", "How long saving device memory took.", registry=registry
        )
        self._wrong = Counter(
            "phosd_wrong_guesses",
            "How often a program wrote where phosd did not expect it.",
            registry=registry,
        )
        self._lag = Histogram(
            "phosd_loop_lag_seconds",
            "How late the event loop is.",
            buckets=_LAGS,
            registry=registry,
        )
        for name, text, read in _gauges(jobs, inventory):
            Gauge(name, text, registry=registry).set_function(read)
        registry.register(_ImageBytes(inventory))
        host, _, port = address.rpartition(":")
        try:
            page = make_wsgi_app(registry)
            self._server = PageServer(host.strip("[]"), int(port), page)
        except OSError as error:
            raise Internal(
                f"metrics cannot be served at {address} ({error.strerror})",
                hint="give another address (`metrics` in phosd.toml), or leave it out",
            ) from error
        self._clock = asyncio.get_running_loop().create_task(self._measure_lag())

    def ended(self, job: Job) -> None:
        """Count an ended job."""
        self._jobs.labels(job.task.operation, str(job.state)).inc()
        if job.task.operation != "checkpoint":
            return
        self._wrong.inc(job.progress.wrong_guesses)
        self._drained.inc(job.drained.bytes)
        self._draining.inc(job.drained.seconds)
        if job.state is JobState.DONE:
            self._stops.labels(job.outcome.mode).observe(job.progress.stop_seconds)

    async def close(self) -> None:
        """Stop serving."""
        self._clock.cancel()
        with suppress(asyncio.CancelledError):
            await self._clock
        await asyncio.to_thread(self._server.close)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_SECONDS
            await asyncio.sleep(_LAG_SECONDS)
            self._lag.observe(max(0.0, loop.time() - due))


def _gauges(jobs: JobTable, inventory: Inventory) -> Iterator[tuple[str, str, Callable[[], float]]]:
    """Yield gauges that are read on request in another thread, each from one snapshot of the
    state.
    """

    def states() -> Count[str]:
        return Count(process.state for process in tuple(inventory.processes.values()))

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


class _ImageBytes(Collector):
    """Stored bytes of each user's images."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory

    def collect(self) -> Iterable[GaugeMetricFamily]:
        by_user: dict[int, list[Manifest]] = {}
        for view in tuple(self._inventory.images.values()):
            by_user.setdefault(view.manifest.owner, []).append(view.manifest)
        sizes = {user: total_bytes(images) for user, images in by_user.items()}
        largest = sorted(sizes, key=lambda user: sizes[user], reverse=True)
        family = GaugeMetricFamily(
            "phosd_image_bytes", "Stored bytes of a user's images.", labels=("user",)
        )
        for user in largest[:_MOST_USERS]:
            family.add_metric((str(user),), sizes[user])
        if others := largest[_MOST_USERS:]:
            family.add_metric(("others",), sum(sizes[user] for user in others))
        yield family
