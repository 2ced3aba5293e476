"""Describe one job: its task, progress and outcome."""

import asyncio
import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from phosd.engine.image.called import Called
from phosd.engine.job.progress import Progress
from phosd.errors import PhosError


class JobState(enum.StrEnum):
    """State of a job. The last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether the state is final."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True)
class Outcome:
    """Result of a finished operation: an image id or a pid, the mode used, and why. ``process`` is
    the key of a process that it has made, of the image ``made_of``, or let go on; ``called`` what
    people call a program of which nothing was known before.
    """

    result: str = ""
    mode: str = ""
    why: str = ""
    process: str = ""
    made_of: str = ""
    called: Called = field(default_factory=Called)


def moved_text(moved: Mapping[int, int]) -> str:
    """Return the result of a job that has moved a program: GPU ordinals, as ``0:1,1:0``."""
    return ",".join(f"{old}:{new}" for old, new in sorted(moved.items()))


@dataclass(frozen=True)
class DrainFigures:
    """Bytes of device memory that were saved, and the seconds that took."""

    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second; 0 when nothing was saved."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


Work = Callable[[Progress], Outcome]


@dataclass(frozen=True)
class Subject:
    """What is known of the program that a job is about: what people call it, and the ordinals of
    the GPUs that it uses.
    """

    called: Called = field(default_factory=Called)
    gpus: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Task:
    """The work of a job. No other job may hold one of its ``claims`` meanwhile.

    With ``queue`` the job waits for those that hold them; otherwise it is refused. ``scheduled``
    marks a periodic checkpoint. ``destination`` is where the process is to go, in the caller's
    words. ``process`` is the key of the process, unique across reboots. ``gpus`` are the ordinals
    of the GPUs that the job uses, as far as known; ``called`` is what people call the program. A
    ``short`` job takes no slot and never waits for others to end.
    """

    operation: str
    target: str
    owner: int
    claims: frozenset[str]
    work: Work
    mode: str = ""
    destination: str = ""
    token: str = ""
    queue: bool = False
    scheduled: bool = False
    executable: str = ""
    process: str = ""
    gpus: frozenset[int] = frozenset()
    called: Called = field(default_factory=Called)
    short: bool = False


@dataclass
class Job:
    """One job. ``started`` (of a waiting job: when it was submitted) and ``ended`` are seconds
    since the epoch. ``position`` is its place in the queue from 1, and 0 when it does not wait.
    """

    number: int
    task: Task
    started: float
    progress: Progress = field(default_factory=Progress)
    state: JobState = JobState.RUNNING
    position: int = 0
    cancelling: bool = False
    ended: float | None = None
    outcome: Outcome = Outcome()
    error: PhosError | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)
    _since: float = field(default_factory=time.monotonic)

    @property
    def called(self) -> Called:
        """What people call its program; empty as long as that is not known."""
        return self.task.called if any(self.task.called) else self.outcome.called

    def begin(self) -> None:
        """Mark the job as running from now on."""
        self.state, self.started, self.position = JobState.RUNNING, time.time(), 0
        self._since = time.monotonic()

    def end(self, state: JobState) -> None:
        """Mark the job as ended. ``ended`` follows the monotonic clock, so that setting the system
        clock does not change the duration.
        """
        self.state, self.position = state, 0
        self.ended = self.started + time.monotonic() - self._since

    @property
    def drained(self) -> DrainFigures:
        """Bytes and seconds that the engine measured; while it has not, the sum of all phases named
        ``drain`` so far, over all attempts.
        """
        figures = self.progress.figures
        if figures.drain_bytes is not None:
            return DrainFigures(figures.drain_bytes, figures.drain_seconds or 0.0)
        now = time.monotonic()
        phases = [phase for phase in self.progress.phases if phase.name == "drain"]
        return DrainFigures(
            sum(phase.bytes_done for phase in phases),
            sum((phase.end or now) - phase.start for phase in phases),
        )
