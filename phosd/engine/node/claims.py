"""Which processes a job works on, and which are being asked for a list.

A connection to a hook, or to the software GPU in a process, is a socket of the process, and CRIU
can save none whose other end stays behind. So nobody asks a process under a job, and a job waits
for whoever asks already.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator

from phosd.errors import Busy


class Claims:
    """Of one node. Safe to use from several threads."""

    def __init__(self) -> None:
        self._claimed: set[int] = set()
        self._asked: Counter[int] = Counter()
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def claim(self, pids: Iterable[int]) -> Iterator[None]:
        """No other job works on these processes inside, and nobody asks them. Raises
        :class:`Busy`.
        """
        wanted = set(pids)
        with self._changed:
            if taken := wanted & self._claimed:
                raise Busy(
                    f"another job works on process {min(taken)}",
                    hint="wait for it (`phos jobs`), or cancel it",
                )
            self._claimed |= wanted
            # Whoever asks gives up after seconds, and nobody begins to any more.
            self._changed.wait_for(lambda: not wanted & self._asked.keys())
        try:
            yield
        finally:
            with self._changed:
                self._claimed -= wanted

    def only(self, pids: Iterable[int]) -> bool:
        """Whether no job works on other processes than these."""
        with self._changed:
            return self._claimed <= set(pids)

    @contextlib.contextmanager
    def asking(self, pid: int) -> Iterator[bool]:
        """Whether a process may be asked inside: no job works on it."""
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
                    self._asked += Counter()  # drops what is zero
                    self._changed.notify_all()
