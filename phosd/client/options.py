"""Options of the calls, by their names on D-Bus. What is left out is phosd's default."""

from phosd.interface.list_options import EventOptions, HistoryOptions
from phosd.interface.move_options import (
    MigrateOptions,
    ResumeOptions,
    SleepOptions,
    SuspendOptions,
)
from phosd.interface.options import (
    CheckpointOptions,
    JobOptions,
    PoolOptions,
    QueueOptions,
    RestoreOptions,
    StopOptions,
    VerifyOptions,
)

__all__ = [
    "CheckpointOptions",
    "EventOptions",
    "HistoryOptions",
    "JobOptions",
    "MigrateOptions",
    "PoolOptions",
    "QueueOptions",
    "RestoreOptions",
    "ResumeOptions",
    "SleepOptions",
    "StopOptions",
    "SuspendOptions",
    "VerifyOptions",
]
