"""What a job is about to stop, or to bring to life: enough to set it right if nobody ends the job.

An engine hands it to its caller (:meth:`Progress.about_to_touch`) before the first process stops.
"""

import os
import time
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Touched:
    """One process of a job. ``start_time`` is None for one that a restore will make.

    ``gpu``: the driver may lock and checkpoint it; ``hooked``: its memory may be parked.
    """

    pid: int
    start_time: int | None
    gpu: bool
    hooked: bool


@dataclass(frozen=True)
class Concern:
    """Every process that a job touches, and the node's ordinals of the GPUs that they see.

    ``image`` is restored by the job; empty for one that saves processes. ``since`` is when, in
    clock ticks since boot: what has an earlier start time the job has not made. ``moves`` maps GPUs
    to others: the driver has checkpointed all processes, and begins to bring them back there.
    """

    processes: tuple[Touched, ...]
    gpus: tuple[int, ...]
    image: str = ""
    since: int = 0
    moves: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Unfinished:
    """A job of this boot that nobody ended. Without a ``concern`` it had touched nothing."""

    job: int
    concern: Concern | None


def now() -> int:
    """Clock ticks since boot, as in start times."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
