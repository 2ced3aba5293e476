"""Limit the time that the analysis takes in an hour, and share it between users."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping

_HOUR = 3600.0


class HourlyTime:
    """The seconds that were used in the last hour, of at most ``limit``. Safe to use from several
    threads.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._spent: deque[tuple[float, int, float]] = deque()
        self._lock = threading.Lock()

    def spend(self, uid: int, seconds: float) -> None:
        """Note what was used for a user."""
        with self._lock:
            self._spent.append((time.monotonic(), uid, seconds))

    def by_user(self) -> Mapping[int, float]:
        """Return what each user has used; 0 for others."""
        begin = time.monotonic() - _HOUR
        found: defaultdict[int, float] = defaultdict(float)
        with self._lock:
            while self._spent and self._spent[0][0] < begin:
                self._spent.popleft()
            for _, uid, seconds in self._spent:
                found[uid] += seconds
        return found

    def is_over(self, uid: int, share: float = 1.0) -> bool:
        """Return whether this share of the limit is used up for a user. No user has all of it: one
        whose files are never read to the end would take it from the others.
        """
        spent = self.by_user()
        most = self._limit * share
        return sum(spent.values()) >= most or spent[uid] >= most / 2
