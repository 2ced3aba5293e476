"""Limit the jobs that run at the same time, and the space that a user's images take."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

MOST_JOBS = 64
"""Most jobs that run at the same time: each has a thread."""


@dataclass(frozen=True)
class JobLimits:
    """How many jobs may run at the same time, in all and on one GPU."""

    jobs: int = 16
    per_gpu: int = 4

    def have_room(
        self,
        gpus: Collection[int],
        running: Sequence[Collection[int]],
        own: Sequence[Collection[int]] = (),
    ) -> bool:
        """Whether one more job may start on ``gpus`` (ordinals) beside the running jobs.

        ``own`` are those of the same user, if it is not root. A quarter of the places is for users
        who have none: a user decides how long a job takes.
        """
        busy, theirs = _by_gpu(running), _by_gpu(own)
        return len(running) < _places(self.jobs, len(own)) and all(
            busy[gpu] < _places(self.per_gpu, theirs[gpu]) for gpu in gpus
        )


def _by_gpu(jobs: Sequence[Collection[int]]) -> Counter[int]:
    return Counter(gpu for gpus in jobs for gpu in gpus)


def _places(limit: int, taken: int) -> int:
    """Return how many places there are for a user who has ``taken`` some."""
    return limit - limit // 4 if taken else limit


def in_turn(waiting: Iterable[tuple[int, int]], running: Iterable[int]) -> list[int]:
    """Return the numbers of the waiting jobs in the order in which they begin: the oldest job of
    the user who has the fewest jobs goes first.

    ``waiting`` has the number and owner of each waiting job, ``running`` the owners of the running
    ones. However many jobs a user queues, another user's first job waits only for those that run.
    """
    have = Counter(running)
    turns = []
    for number, owner in sorted(waiting):
        turns.append((have[owner], number))
        have[owner] += 1
    return [number for _, number in sorted(turns)]


@dataclass(frozen=True)
class UserLimits:
    """Limits on one user's images: a ``[[limits]]`` table. Sizes are in bytes.

    A checkpoint that would exceed ``quota`` is refused. The other fields delete images: those older
    than ``keep_days``, all but the newest ``keep``, all but the newest ``keep_each`` of each
    program that has a name, and the oldest while all take more than ``keep_bytes``. The last good
    image of a living process is kept nevertheless, unless ``keep_last`` is false. ``user`` is a
    user id; None applies to all users.
    """

    user: int | None = None
    quota: int | None = None
    keep: int | None = None
    keep_each: int | None = None
    keep_days: float | None = None
    keep_bytes: int | None = None
    keep_last: bool = True

    @property
    def delete(self) -> bool:
        """Whether these limits delete images at all."""
        limits = (self.keep, self.keep_each, self.keep_days, self.keep_bytes)
        return any(limit is not None for limit in limits)


NO_LIMITS = UserLimits()


def limits_of(rules: Iterable[UserLimits], user: int) -> UserLimits:
    """Return the first rule that applies to a user id, or no limits."""
    return next((rule for rule in rules if rule.user in (None, user)), NO_LIMITS)
