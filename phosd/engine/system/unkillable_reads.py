"""Look at processes of others that may hold up whoever looks.

What ``/proc`` says of a process's memory is read under a lock of that process, and the driver's
state is told by the process itself. A user can keep both from being answered for ever, and who
waits for the former cannot even be killed. So each look is made by a thread that can be left
behind.
"""

import logging
import math
import queue
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from phosd.engine.system import procfs

TIMEOUT = 3.0
"""Seconds that one look may take."""
_LONGEST_REST = 64.0
"""Seconds for which a process that held up looks again and again is not looked at; at first, 1."""
_HELD_BY_USER = 2
"""Processes of one user that may hold up looks at a time; their others are not looked at then. Root
may have any number: it could do worse.
"""
_BY_USER = 2.0
"""Seconds that looks at processes of one user may cost others, and one more look; root's any."""
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Held:
    """A process that held up its last look, or does so still."""

    uid: int
    thread: threading.Thread
    since: float
    rest: float

    @property
    def counts(self) -> bool:
        """Whether it is not to be looked at now."""
        return self.thread.is_alive() or time.monotonic() < self.since + self.rest

    @property
    def is_known(self) -> bool:
        """Whether it rests for longer if it does it again."""
        return self.counts or time.monotonic() < self.since + 10 * _LONGEST_REST


class AbandonableThreads:
    """Threads that look at processes, and what holds them up. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[procfs.ProcessId | None, _Held] = {}

    def each(
        self, pids: Iterable[int], look: Callable[[int], _T], seconds: float = math.inf
    ) -> Iterator[tuple[int, _T]]:
        """Yield what ``look`` returns for each process, without those that hold it up, and without
        the rest of a user's processes, or of all, when looking at them has taken too long.

        Raises what ``look`` raises. It may go on in its thread after this has ended.
        """
        end = time.monotonic() + seconds
        cost: defaultdict[int, float] = defaultdict(float)
        left = self._allowed(pids, cost)
        while left:
            round_ = _Round(left, look)
            try:
                for pid in left:
                    began, user = time.monotonic(), owner(pid)
                    found = round_.next(max(0.0, min(TIMEOUT, end - began)))
                    took = time.monotonic() - began
                    self._answered(pid)
                    yield pid, found
                    cost[user] += took
                    if user != 0 and cost[user] >= _BY_USER:
                        break
                else:
                    return
            except queue.Empty:
                if time.monotonic() >= end:
                    _log.warning("there was no time to look at all processes")
                    return
                cost[user] += TIMEOUT
                self._hold(pid, round_.thread)
            finally:
                round_.leave()
            left = self._allowed(left[left.index(pid) + 1 :], cost)

    def _allowed(self, pids: Iterable[int], cost: Mapping[int, float]) -> list[int]:
        """Return the processes to look at: none that holds looks up, or whose user does so."""
        with self._lock:
            self._held = {process: why for process, why in self._held.items() if why.is_known}
            held = {process: why for process, why in self._held.items() if why.counts}
        by_user = Counter(why.uid for why in held.values())
        barred = {uid for uid, count in by_user.items() if count >= _HELD_BY_USER}
        barred |= {uid for uid, seconds in cost.items() if seconds >= _BY_USER}
        barred.discard(0)
        if not held and not barred:
            return list(pids)
        return [
            pid for pid in pids if procfs.process_id(pid) not in held and owner(pid) not in barred
        ]

    def _answered(self, pid: int) -> None:
        if self._held:
            with self._lock:
                self._held.pop(procfs.process_id(pid), None)

    def _hold(self, pid: int, thread: threading.Thread) -> None:
        uid, process = owner(pid), procfs.process_id(pid)
        _log.warning("process %d of user %d holds up whoever looks at it", pid, uid)
        with self._lock:
            before = self._held.get(process)
            rest = min(2 * before.rest, _LONGEST_REST) if before else 1.0
            self._held[process] = _Held(uid, thread, time.monotonic(), rest)


class _Round(Generic[_T]):
    """One thread that looks at some processes, one after the other, until it is left."""

    def __init__(self, pids: Sequence[int], look: Callable[[int], _T]) -> None:
        self._results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._left = False
        self.thread = threading.Thread(
            target=self._run, args=(pids, look), name="look", daemon=True
        )
        self.thread.start()

    def next(self, patience: float) -> _T:
        """Return the next result, or raise its error. Raises :class:`queue.Empty` if it is late."""
        found, error = self._results.get(timeout=patience)
        if error is not None:
            raise error
        return found  # type: ignore[no-any-return]

    def leave(self) -> None:
        """Let the thread end after its present look."""
        self._left = True

    def _run(self, pids: Sequence[int], look: Callable[[int], _T]) -> None:
        for pid in pids:
            if self._left:
                return
            try:
                self._results.put((look(pid), None))
            except BaseException as error:
                self._results.put((None, error))
                return


def at_once(pids: Iterable[int], look: Callable[[int], _T], seconds: float) -> dict[int, _T]:
    """Return what ``look`` returns for each process, without those that take longer than that.

    Each is looked at by a thread of its own: none waits for another. Raises what ``look`` raises.
    A process that has not answered yet is not asked another question, and not the same one twice.
    """
    rounds: dict[int, _Round[_T]] = {}
    with _asking_lock:
        for answered in [each for each, (_, held) in _asking.items() if not held.thread.is_alive()]:
            del _asking[answered]
        for pid in {*pids}:
            process = procfs.process_id(pid)
            before, held = _asking.get(process, (None, None)) if process else (None, None)
            if held is None:
                rounds[pid] = _Round([pid], look)
            elif before == look:
                rounds[pid] = held
    end = time.monotonic() + seconds
    found = {}
    for pid, each in rounds.items():
        try:
            found[pid] = each.next(max(0.0, end - time.monotonic()))
        except queue.Empty:
            _log.warning("process %d of user %d does not let itself be looked at", pid, owner(pid))
            if (process := procfs.process_id(pid)) is not None:
                with _asking_lock:
                    _asking[process] = look, each
    return found


_asking: dict[procfs.ProcessId, tuple[Callable[[int], Any], _Round[Any]]] = {}
"""Processes that have not answered in time, each with the question and who waits for them."""
_asking_lock = threading.Lock()


def fairly(pids: Iterable[int]) -> list[int]:
    """Return processes in an order for looks that may run out of time.

    Root's are first, then those of users with few processes; each time other ones of a user.
    """
    by_user: defaultdict[int, list[int]] = defaultdict(list)
    for pid in pids:
        by_user[owner(pid)].append(pid)
    users = random.sample([*by_user], len(by_user))
    users.sort(key=lambda user: (user != 0, len(by_user[user])))
    return [pid for user in users for pid in random.sample(by_user[user], len(by_user[user]))]


def owner(pid: int) -> int:
    """Return the user of a process; -1 if it has ended."""
    try:
        return (procfs.PROC / str(pid)).stat().st_uid
    except OSError:
        return -1


ABANDONABLE_THREADS = AbandonableThreads()
"""The threads of this process: what holds up one look holds up the next."""


def describe(pid: int) -> str:
    """Describe a process of whomever for messages; without its command if it cannot be read."""
    return dict(ABANDONABLE_THREADS.each([pid], procfs.describe)).get(pid, f"pid {pid}")
