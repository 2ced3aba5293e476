"""Keep jobs and queries away from processes that a job works on.

A connection to a hook, or to the software GPU in a process, is a socket of the process, and CRIU
cannot dump a socket whose other end is outside of the tree. So no process under a job is queried,
and a job waits for queries that have begun.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from phosd.errors import Busy

_QUERY_SECONDS = 30.0
"""How long a query may take that began before the claim; one that is held up never ends."""


class Claims:
    """The claims of one node. Safe to use from several threads."""

    def __init__(self) -> None:
        self._claimed: set[int] = set()
        self._asked: Counter[int] = Counter()
        self._changed = threading.Condition()
        self.when_idle: Callable[[], object] = lambda: None
        """Called when the last job has ended: on its thread, so it must not block."""

    @contextlib.contextmanager
    def claim(self, pids: Iterable[int]) -> Iterator[None]:
        """Keep other jobs and queries away from these processes inside the context.

        Raises :class:`Busy` if another job has claimed one of them.
        """
        wanted = set(pids)
        with self._changed:
            if taken := wanted & self._claimed:
                raise Busy(
                    f"another job works on process {min(taken)}",
                    hint="wait for it (`phos jobs`), or cancel it (`phos jobs --cancel`)",
                )
            self._claimed |= wanted
            # Most queries give up after seconds, and no new ones begin.
            if not self._changed.wait_for(lambda: not wanted & self._asked.keys(), _QUERY_SECONDS):
                self._claimed -= wanted
                raise Busy(
                    f"process {min(wanted & self._asked.keys())} holds up whoever looks at it",
                    hint="see what it, or the file system that it uses, waits for",
                )
        try:
            yield
        finally:
            with self._changed:
                self._claimed -= wanted
                idle = bool(wanted) and not self._claimed
            if idle:
                self.when_idle()

    def only(self, pids: Iterable[int]) -> bool:
        """Return whether no job works on processes other than these."""
        with self._changed:
            return self._claimed <= set(pids)

    @contextlib.contextmanager
    def asking(self, pid: int) -> Iterator[bool]:
        """Register a query of a process inside the context; yields False if a job works on it."""
        with self._changed:
            free = pid not in self._claimed
            if free:
                self._asked[pid] += 1
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._asked[pid] -= 1
                    self._asked += Counter()  # drops zero counts
                    self._changed.notify_all()
