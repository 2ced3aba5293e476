"""Record which processes a job will stop or restore, so that an interrupted job can be settled.

An operation passes the record to its caller (:meth:`Progress.about_to_touch`) before it stops the
first process.
"""

import os
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AffectedProcess:
    """A process that a job stops or restores. ``start_time`` is None if a restore will create it.

    ``gpu``: the driver may lock and checkpoint it; ``hooked``: its memory may be parked.
    """

    pid: int
    start_time: int | None
    gpu: bool
    hooked: bool


@dataclass(frozen=True)
class AffectedSet:
    """All processes that a job stops or restores, and the node's ordinals of the GPUs they see.

    ``image`` is the image that the job restores; empty for a job that saves processes. ``since`` is
    the time of this record in clock ticks since boot: the job did not create processes that started
    before it. ``moves`` maps old GPUs to new ones; it is set once the driver has checkpointed all
    processes and is about to restore them there.
    """

    processes: tuple[AffectedProcess, ...]
    gpus: tuple[int, ...]
    image: str = ""
    since: int = 0
    moves: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class InterruptedJob:
    """A job of this boot that phosd did not survive; it touched nothing if ``affected`` is None."""

    job: int
    affected: AffectedSet | None


def now() -> int:
    """Return the clock ticks since boot, the unit of start times."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
