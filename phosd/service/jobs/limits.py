"""Limit the jobs that run at the same time, and the space that a user's images take."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from phosd.service.config_values import (
    AbsolutePath,
    Days,
    Images,
    LargeSize,
    Size,
    Truth,
    UserId,
    Versions,
    about,
)

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


class UserLimits(msgspec.Struct, frozen=True):
    """Limits on one user's images: a ``[[limits]]`` table."""

    user: Annotated[UserId | None, about("Whose images; by default everybody's.")] = None
    quota: Annotated[Size | None, about("A checkpoint that would exceed it is refused.")] = None
    keep: Annotated[Images | None, about("How many are kept, the newest good ones.")] = None
    keep_each: Annotated[
        Images | None, about("How many of each program that has a name are kept.")
    ] = None
    keep_days: Annotated[Days | None, about("How many days an image is kept.")] = None
    keep_bytes: Annotated[
        LargeSize | None, about("The oldest images go while all take more than this.")
    ] = None
    keep_versions: Annotated[
        Versions | None,
        about("How many versions of a file that restores have left beside it are kept."),
    ] = None
    keep_last: Annotated[
        Truth,
        about(
            "Whether the last good image of a living process is kept nevertheless, and, until it "
            "is older than `keep_days`, the image with which a program was ended and from which "
            "nobody has restored it yet."
        ),
    ] = True

    @property
    def delete(self) -> bool:
        """Whether these limits delete images at all."""
        limits = (self.keep, self.keep_each, self.keep_days, self.keep_bytes)
        return any(limit is not None for limit in limits)


NO_LIMITS = UserLimits()


class KeptFile(msgspec.Struct, frozen=True):
    """Files that are saved with a user's programs: a ``[[files]]`` table."""

    path: Annotated[
        AbsolutePath,
        about("""A folder with all in it, a file, or a pattern (`/data/*/runs`). What of it is the
            user's own is saved with each of the user's programs, open or not."""),
    ]
    user: Annotated[UserId | None, about("With whose programs; by default everybody's.")] = None


def limits_of(rules: Iterable[UserLimits], user: int) -> UserLimits:
    """Return the first rule that applies to a user id, or no limits."""
    return next((rule for rule in rules if rule.user in (None, user)), NO_LIMITS)
