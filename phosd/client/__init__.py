"""Use phosd from Python, as ``phos`` and ``phos-tui`` do: docs/reference/python.md.

    from phosd.client import Client

    with Client() as client:
        image = client.checkpoint(4711).wait().result

What is exported here is stable; the modules of this package are not.
"""

from typing import TYPE_CHECKING

from phosd.exports import lazily

# `phos --help` needs no event loop, and what shows an error no bus.
if TYPE_CHECKING:
    from phosd.client.async_client import AsyncClient, Change
    from phosd.client.checks import Check
    from phosd.client.evacuation import Step
    from phosd.client.job_handle import AsyncJobHandle
    from phosd.client.kernels import Kernel
    from phosd.client.options import (
        CheckpointOptions,
        EventOptions,
        HistoryOptions,
        JobOptions,
        MigrateOptions,
        PoolOptions,
        QueueOptions,
        RestoreOptions,
        ResumeOptions,
        SleepOptions,
        StopOptions,
        SuspendOptions,
        VerifyOptions,
    )
    from phosd.client.past import Event
    from phosd.client.records import Gpu, Image, Job, Manager, Phase, Pool, Process, Record
    from phosd.client.sync_client import Client
    from phosd.client.sync_job import JobHandle
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "sync_client": ("Client",),
            "sync_job": ("JobHandle",),
            "async_client": ("AsyncClient", "Change"),
            "checks": ("Check",),
            "records": ("Gpu", "Image", "Job", "Manager", "Phase", "Pool", "Process", "Record"),
            "past": ("Event",),
            "job_handle": ("AsyncJobHandle",),
            "kernels": ("Kernel",),
            "evacuation": ("Step",),
            "options": (
                "CheckpointOptions",
                "EventOptions",
                "HistoryOptions",
                "JobOptions",
                "MigrateOptions",
                "PoolOptions",
                "QueueOptions",
                "RestoreOptions",
                "ResumeOptions",
                "StopOptions",
                "SleepOptions",
                "SuspendOptions",
                "VerifyOptions",
            ),
        },
    )

__all__ = [
    "AsyncClient",
    "AsyncJobHandle",
    "Change",
    "Check",
    "CheckpointOptions",
    "Client",
    "Event",
    "EventOptions",
    "Gpu",
    "HistoryOptions",
    "Image",
    "Job",
    "JobHandle",
    "JobOptions",
    "Kernel",
    "Manager",
    "MigrateOptions",
    "Phase",
    "Pool",
    "PoolOptions",
    "Process",
    "QueueOptions",
    "Record",
    "RestoreOptions",
    "ResumeOptions",
    "SleepOptions",
    "Step",
    "StopOptions",
    "SuspendOptions",
    "VerifyOptions",
]
