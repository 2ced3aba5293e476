"""Record what a job is about to stop or restore: enough to set it right if it is interrupted.

An engine hands it to its caller (:meth:`Progress.about_to_touch`) before the first process stops.
"""

import os
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AffectedProcess:
    """One process that a job stops or makes. ``start_time`` is None for one that a restore makes.

    ``gpu``: the driver may lock and checkpoint it; ``hooked``: its memory may be parked.
    """

    pid: int
    start_time: int | None
    gpu: bool
    hooked: bool


@dataclass(frozen=True)
class AffectedSet:
    """All processes that a job stops or makes, and the node's ordinals of the GPUs that they see.

    ``image`` is the image that the job restores; empty for one that saves processes. ``since`` is
    the time of this record in clock ticks since boot: processes that started before it were not
    made by the job. ``moves`` maps GPUs to others: the driver has checkpointed all processes, and
    begins to bring them back there.
    """

    processes: tuple[AffectedProcess, ...]
    gpus: tuple[int, ...]
    image: str = ""
    since: int = 0
    moves: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class InterruptedJob:
    """A job of this boot that phosd did not survive; without ``affected`` it touched nothing."""

    job: int
    affected: AffectedSet | None


def now() -> int:
    """Clock ticks since boot, as in start times."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
