"""Options of the calls, by their names on D-Bus. What is left out is phosd's default."""

from phosd.interface.list_options import EventOptions, HistoryOptions
from phosd.interface.options import (
    CheckpointOptions,
    JobOptions,
    MigrateOptions,
    PoolOptions,
    QueueOptions,
    RestoreOptions,
    ResumeOptions,
    StopOptions,
    SuspendOptions,
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
    "StopOptions",
    "SuspendOptions",
    "VerifyOptions",
]
