"""One job: what it is to do, how far it is, and how it ended."""

import asyncio
import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phosd.engine.job.progress import Progress
from phosd.errors import PhosError


class JobState(enum.StrEnum):
    """A job runs, at once or after others, and ends in one of the last three states."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing changes any more."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True)
class Outcome:
    """What a finished operation tells: an image id or a pid, the mode that was used and why."""

    result: str = ""
    mode: str = ""
    why: str = ""


@dataclass(frozen=True)
class DrainFigures:
    """How many bytes of device memory were saved, and how many seconds that took."""

    bytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second; 0 when nothing was saved."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


Work = Callable[[Progress], Outcome]


@dataclass(frozen=True)
class Task:
    """What a job is to do. ``claims`` are the things that no other job may touch meanwhile.

    With ``queue`` it waits for jobs that hold them; otherwise it is refused. ``scheduled`` is one
    that nobody asked for by itself. ``destination`` is where the process is to go, as the caller
    said it. ``process`` names the process that it is for, for ever.
    ``gpus`` are the ordinals of the GPUs that it works on, as far as they are known; a ``short``
    one never waits for others to end.
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
    short: bool = False


@dataclass
class Job:
    """One job. ``started`` (of one that waits: when it was asked for) and ``ended`` are seconds
    since the epoch. ``position`` is its place among those that wait, from 1; 0 when it does not.
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

    def begin(self) -> None:
        """It runs from now on."""
        self.state, self.started, self.position = JobState.RUNNING, time.time(), 0
        self._since = time.monotonic()

    def end(self, state: JobState) -> None:
        """It has ended; ``ended`` is as much later as it took, however the clock was set."""
        self.state, self.position = state, 0
        self.ended = self.started + time.monotonic() - self._since

    @property
    def drained(self) -> DrainFigures:
        """As the engine has measured it, or else what the phases named ``drain`` have done so far,
        of every attempt.
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
