"""What a job is about to stop, or to bring to life: enough to set it right if nobody ends the job.

An engine hands it to its caller (:meth:`Progress.about_to_touch`) before the first process stops.
"""

from dataclasses import dataclass


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
    """Every process that a job touches, the node's ordinals of their GPUs, and the image that is
    restored (empty: processes that run are saved).
    """

    processes: tuple[Touched, ...]
    gpus: tuple[int, ...]
    image: str = ""
