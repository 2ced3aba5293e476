"""Serve metrics to Prometheus: counters of ended jobs, and the node's gauges (``gauges.py``).

Labels are operations, states and modes; never processes, command lines or images, whose number is
unbounded. This module needs the extra ``metrics`` and is imported only if metrics are configured.
"""

import asyncio
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, make_wsgi_app

from phosd.errors import Internal
from phosd.interface.options import CheckpointMode, Operation
from phosd.service.api.gauges import Sources, register
from phosd.service.api.page_server import PageServer
from phosd.service.jobs.job import Job, JobState

_LAG_SECONDS = 1.0
_STARTS = (0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_LEVELS = ("ready", "hollow", "image")
"""What a program of a pool is started from."""
_STOPS = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_LAGS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)


class Metrics:
    """Serves metrics over HTTP in a thread of its own. Raises :class:`Internal` when it cannot
    listen.
    """

    def __init__(self, address: str, sources: Sources) -> None:
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
        self._starts = Histogram(
            "phosd_start_seconds",
            "How long the starts of programs of pools took.",
            ("level",),
            buckets=_STARTS,
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
        self._begin_at_zero()
        register(registry, sources)
        host, _, port = address.rpartition(":")
        try:
            page = make_wsgi_app(registry)
            self._server = PageServer(host.strip("[]"), int(port), page)
        except OSError as error:
            raise Internal(
                f"metrics cannot be served at {address} ({error.strerror})",
                hint="give another address (`metrics` in phosd.toml), or leave it out",
            ) from error
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._measure_lag()),
            loop.create_task(sources.watch_disk()),
        ]

    def ended(self, job: Job) -> None:
        """Count an ended job."""
        self._jobs.labels(job.task.operation, str(job.state)).inc()
        if job.task.operation == "start" and job.state is JobState.DONE and job.ended:
            self._starts.labels(job.outcome.mode).observe(job.ended - job.started)
        if job.task.operation != "checkpoint":
            return
        self._wrong.inc(job.progress.wrong_guesses)
        self._drained.inc(job.drained.bytes)
        self._draining.inc(job.drained.seconds)
        if job.state is JobState.DONE:
            self._stops.labels(job.outcome.mode).observe(job.progress.stop_seconds)

    async def close(self) -> None:
        """Stop serving."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._server.close)

    def _begin_at_zero(self) -> None:
        """Tell of all jobs and modes from the start: of what appears with its first count,
        ``increase()`` knows no earlier value, and leaves that count out.
        """
        for operation in get_args(Operation):
            for state in JobState:
                if state.ended:
                    self._jobs.labels(operation, str(state))
        for level in _LEVELS:
            self._starts.labels(level)
        for mode in get_args(CheckpointMode):
            if mode != "auto":
                self._stops.labels(mode)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_SECONDS
            await asyncio.sleep(_LAG_SECONDS)
            self._lag.observe(max(0.0, loop.time() - due))
