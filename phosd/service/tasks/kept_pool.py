"""Count the programs of a pool: those that wait, those that run, those that are on their way."""

import asyncio
import threading
from dataclasses import dataclass, field

from phosd.engine.system.procfs import ProcessId
from phosd.service.jobs.pool import Member, Pool
from phosd.service.jobs.table import Job


@dataclass
class KeptPool:
    """A pool with its programs: those that wait, oldest first, and those that were started.

    ``starting`` are starts that have begun, ``resuming`` those of them that have taken a program
    that waited, ``restoring`` those that make one of the image, and ``making`` the names of the
    clones that are being made to wait.
    """

    pool: Pool
    waiting: list[Member] = field(default_factory=list)
    started: list[ProcessId] = field(default_factory=list)
    making: set[str] = field(default_factory=set)
    starting: int = 0
    resuming: int = 0
    restoring: int = 0
    job: Job | None = None
    """The one that has made a program last, or makes it."""
    trouble: str = ""
    removed: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while all this changes, which jobs do in their threads."""

    @property
    def room(self) -> int:
        """How many programs more there may be."""
        there = len(self.waiting) + len(self.started)
        return self.pool.most - there - len(self.making) - self.resuming - self.restoring

    @property
    def wanted(self) -> int:
        """How many are to wait: there may be fewer than the pool says."""
        taken = len(self.started) + self.resuming + self.restoring
        return max(0, min(self.pool.hollow, self.pool.most - taken))

    @property
    def is_exhausted(self) -> bool:
        """Whether there is none for one more start, and none may be made for it."""
        asking = self.starting - self.resuming - self.restoring
        return asking >= len(self.waiting) + len(self.making) + self.room

    @property
    def pids(self) -> set[int]:
        """The pids of all programs."""
        return {each.process.pid for each in self.members}

    @property
    def members(self) -> list[Member]:
        """All programs."""
        return [*self.waiting, *map(Member, self.started)]
