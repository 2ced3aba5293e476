"""The processes that a restore makes: watched while CRIU works, and ended if it fails."""

import os
import select
import time
from collections.abc import Mapping, Sequence, Set
from types import TracebackType
from typing import Self

from phosd.engine.criu.restore.saved_tree import SavedTree
from phosd.engine.criu.run.owned_processes import (
    ENDING_TIMEOUT,
    end,
    end_restoring,
    is_made,
    kill,
)
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.image.manifest import Process
from phosd.engine.job.affected import now
from phosd.engine.program.namespace_maker import NamespaceMaker
from phosd.engine.system import procfs
from phosd.errors import Internal

ENDED_SECONDS = 3.0
"""How long CRIU may wait for a process that has ended. It notices most of them at once."""
_BETWEEN_LOOKS = 0.5
_LOOK_MILLISECONDS = 20


class RestoredProcesses:
    """The processes that a restore of ``tree`` makes from now on, in a ``namespace`` of their own
    or with the ids that they had.
    """

    def __init__(self, tree: SavedTree, namespace: NamespaceMaker | None = None) -> None:
        self._wanted = {process.pid: process for process in tree.processes}
        self._ids = tree.ids
        self._user, self._since = tree.user.uid, now()
        self._seen: set[int] = set()
        """Those that have been there."""
        self._ended_at: float | None = None
        self._next_look = 0.0
        self._namespace = namespace
        self.mark = namespace.name if namespace is not None else str(tree.record.root)

    def _ours(self, pid: int) -> bool:
        return is_made(self._wanted[pid], self._user, self._since)

    def found(self, ids: Mapping[int, int]) -> list[Process]:
        """Return the saved processes that are there by these :meth:`ids`, and were made since: an
        image may name processes that CRIU does not make, whose ids somebody else may have got.
        """
        return [
            process
            for pid, process in self._wanted.items()
            if pid in ids and (self._namespace is not None or self._ours(pid))
        ]

    def ids(self) -> dict[int, int]:
        """Return the ids of saved processes and threads that are there, as we know them, by those
        that they were saved with.
        """
        if self._namespace is None:
            return {number: number for number in self._ids}
        made = self._namespace.namespace
        return {n: now for n, now in made.members().items() if n in self._ids} if made else {}

    def kill(self) -> None:
        """Kill those that there are."""
        if self._namespace is not None:
            self._namespace.end()
        else:
            kill(self._wanted, self._ours)

    def require_alive(self, living: Set[int]) -> None:
        """Raise :class:`Internal` if one of the ``living`` ended a while ago.

        CRIU, which made it, may wait for it for ever.
        """
        if self._namespace is not None:  # to find them takes a look at all processes
            if time.monotonic() < self._next_look:
                return
            self._next_look = time.monotonic() + _BETWEEN_LOOKS
        if self._seen <= self.look(living):
            self._ended_at = None
            return
        self._ended_at = self._ended_at or time.monotonic()
        if time.monotonic() - self._ended_at > ENDED_SECONDS:
            raise Internal(
                "the program ended while it was restored",
                hint="somebody with its user's rights has ended it; try again",
            )

    def look(self, living: Set[int]) -> Set[int]:
        """Return which of the ``living`` are alive, and remember which are there: CRIU collects
        some that end, of which nothing is left.
        """
        there = self.ids()
        found = {
            pid: procfs.stat(there[pid]) for pid in living & self._wanted.keys() & there.keys()
        }
        made = {pid: each for pid, each in found.items() if each and each.start_time >= self._since}
        self._seen |= made.keys()
        return {pid for pid, each in made.items() if not each.dead}

    def end(self) -> None:
        """Kill them and what CRIU has left, and wait until they have ended."""
        if self._namespace is not None:
            self._namespace.end()
        else:
            end(self._wanted, self._ours)
        end_restoring([self.mark], self._since)


class StayAlive(CriuPart):
    """Fails a restore if one of the ``living`` ends, which CRIU itself may not notice."""

    def __init__(self, processes: RestoredProcesses, living: Set[int]) -> None:
        self._processes = processes
        self._living = living
        self._looked = False

    def watch(self) -> None:
        self._processes.require_alive(self._living)

    def made(self) -> bool:
        if not self._looked:
            self._processes.look(self._living)
            self._looked = True
        return True


class NoneLeft(CriuPart):
    """After a failure, waits until all CRIU processes have ended.

    They inherit a descriptor, which is closed when all are gone. A process below the restore shim
    ends a moment after the shim; until then it can create processes and files, which must not stay.
    """

    def __init__(self, processes: RestoredProcesses) -> None:
        self._processes = processes
        self._reader = self._writer = -1

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        return self

    @property
    def descriptors(self) -> Sequence[int]:
        return [self._writer]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._writer)
        try:
            if error is not None:
                self._await_end()
        finally:
            os.close(self._reader)

    def _await_end(self) -> None:
        closed = select.poll()
        closed.register(self._reader, select.POLLHUP)
        give_up = time.monotonic() + ENDING_TIMEOUT
        self._processes.end()
        while not closed.poll(_LOOK_MILLISECONDS) and time.monotonic() < give_up:
            self._processes.end()
