"""Count the programs of a pool: those that wait, those that run, those that are on their way."""

import asyncio
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from phosd.engine.system.procfs import ProcessId
from phosd.service.jobs.pool import Member, Pool
from phosd.service.jobs.table import Job


@dataclass
class KeptPool:
    """A pool with its programs: those that wait, oldest first, and those that were started. Those
    that wait are ready if their suspension is in ``ready``; ``readying`` are on their way there.

    ``starting`` are starts that have begun, ``resuming`` those of them that have taken a program
    that waited, ``restoring`` those that make one of the image, and ``making`` the names of the
    clones that are being made to wait.
    """

    pool: Pool
    waiting: list[Member] = field(default_factory=list)
    started: list[ProcessId] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    readying: list[Member] = field(default_factory=list)
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
        there = len(self.resting) + len(self.started)
        return self.pool.most - there - len(self.making) - self.resuming - self.restoring

    @property
    def wanted(self) -> int:
        """How many are to wait: there may be fewer than the pool says."""
        taken = len(self.started) + self.resuming + self.restoring
        return max(0, min(self.pool.waiting, self.pool.most - taken))

    @property
    def resting(self) -> list[Member]:
        """Those that wait, or are being made ready."""
        return [*self.waiting, *self.readying]

    @property
    def are_ready(self) -> list[Member]:
        """Those that wait with their memory on the GPUs."""
        return [each for each in self.waiting if each.suspension in self.ready]

    @property
    def to_load(self) -> Member | None:
        """One that is to become ready, if one is."""
        if len(self.are_ready) >= min(self.pool.ready, self.wanted):
            return None
        return next((each for each in self.waiting if each.suspension not in self.ready), None)

    @property
    def to_unload(self) -> Member | None:
        """One that is ready, and one too many."""
        found = self.are_ready
        return found[0] if len(found) > self.pool.ready else None

    def soonest(self) -> Member:
        """Take out the one that starts soonest, of those that wait. Hold the lock."""
        member = next(iter(self.are_ready), self.waiting[0])
        self.waiting.remove(member)
        return member

    @property
    def is_exhausted(self) -> bool:
        """Whether there is none for one more start, and none may be made for it."""
        asking = self.starting - self.resuming - self.restoring
        return asking >= len(self.resting) + len(self.making) + self.room

    @property
    def pids(self) -> set[int]:
        """The pids of all programs."""
        return {each.process.pid for each in self.members}

    @property
    def members(self) -> list[Member]:
        """All programs."""
        return [*self.resting, *map(Member, self.started)]

    def taken(self) -> Member | None:
        """Take out one that can be spared best: that is hollow, and has waited longest. None if
        none waits.
        """
        with self.lock:
            hollow = (each for each in self.waiting if each.suspension not in self.ready)
            member = next(hollow, next(iter(self.waiting), None))
            if member is not None:
                self.waiting.remove(member)
            return member

    def reserved(self) -> str:
        """Count one more that is being made, if there is room for it. Returns its name, or
        nothing.
        """
        with self.lock:
            if self.room <= 0:
                return ""
            self.making.add(clone := clone_name(self.pool))
            return clone

    @contextmanager
    def moving(self, member: Member) -> Iterator[bool]:
        """Let nobody start one that waits, inside the context; yields whether it still waited."""
        with self.lock:
            if there := member in self.waiting:
                self.waiting.remove(member)
                self.readying.append(member)
        try:
            yield there
        finally:
            with self.lock:
                if there:
                    self.readying.remove(member)
                    self.waiting.insert(0, member)


def clone_name(pool: Pool) -> str:
    """Return a new name for a clone of a pool's image."""
    return f"{pool.name[:23]}-{secrets.token_hex(4)}"
