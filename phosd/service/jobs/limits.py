"""How much at once, and how much in all: slots of jobs, and what a user's images may take."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

MOST_JOBS = 64
"""Jobs at the same time, at most: each has a thread."""


@dataclass(frozen=True)
class JobLimits:
    """How many jobs may run at the same time: of all, and of those that work on one GPU."""

    jobs: int = 16
    per_gpu: int = 4

    def have_room(self, gpus: Collection[int], running: Sequence[Collection[int]]) -> bool:
        """Whether one more job may run on ``gpus`` (ordinals), beside those that do."""
        busy = Counter(gpu for theirs in running for gpu in theirs)
        return len(running) < self.jobs and all(busy[gpu] < self.per_gpu for gpu in gpus)


def in_turn(waiting: Iterable[tuple[int, int]], running: Iterable[int]) -> list[int]:
    """The order in which jobs begin: whoever has the fewest jobs is next, with the oldest.

    ``waiting`` are the numbers and owners of jobs, ``running`` the owners of those that run. A user
    with many jobs delays another's first one by no more than those that run already.
    """
    have = Counter(running)
    turns = []
    for number, owner in sorted(waiting):
        turns.append((have[owner], number))
        have[owner] += 1
    return [number for _, number in sorted(turns)]


@dataclass(frozen=True)
class UserLimits:
    """What the images of one user may take: a ``[[limits]]`` table. Sizes in bytes.

    ``quota``: a checkpoint that would exceed it is refused. The others delete images: those older
    than ``keep_days``, all but the newest ``keep``, and the oldest while they take more than
    ``keep_bytes``. The last good image of a process that runs is kept nevertheless, unless
    ``keep_last`` is false. ``user`` is a user id; without one the table is for everybody.
    """

    user: int | None = None
    quota: int | None = None
    keep: int | None = None
    keep_days: float | None = None
    keep_bytes: int | None = None
    keep_last: bool = True

    @property
    def delete(self) -> bool:
        """Whether images go by themselves at all."""
        return (self.keep, self.keep_days, self.keep_bytes) != (None, None, None)


NO_LIMITS = UserLimits()


def limits_of(rules: Iterable[UserLimits], user: int) -> UserLimits:
    """The first of the rules that is about this user id, or no limits."""
    return next((rule for rule in rules if rule.user in (None, user)), NO_LIMITS)
