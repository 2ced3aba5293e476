"""Say of each program whether it is protected: how old its newest image is, against its schedule,
and what went wrong last.

It follows from the records of processes, images and jobs alone. Clients have these from the bus,
and the service has them for its metrics: both say the same.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from phosd.interface.records import Image, Job, Process


class Protection(StrEnum):
    """How well a program is protected, the worst first.

    ``FAILED``: what was asked for last, and would have made an image, failed. ``NEVER``: it has no
    image. ``LATE``: the newest one is older than its schedule allows. ``SAVED``: it has an image,
    and no schedule makes another. ``PROTECTED``: its schedule is kept. ``WAITING``: it waits in a
    pool to be started, and has nothing to lose. ``ENDED``: it was saved by a schedule, and runs no
    more.
    """

    FAILED = "failed"
    NEVER = "never"
    LATE = "late"
    SAVED = "saved"
    PROTECTED = "protected"
    WAITING = "waiting"
    ENDED = "ended"

    @property
    def needs_attention(self) -> bool:
        """Whether somebody should look."""
        return self in (Protection.FAILED, Protection.NEVER, Protection.LATE)

    @property
    def counts(self) -> bool:
        """Whether such a program is one of those that run: it neither waits nor has ended."""
        return self not in (Protection.WAITING, Protection.ENDED)

    @property
    def sign(self) -> str:
        """What stands beside the word, so that it is found at a glance, without colour, too."""
        return _SIGNS[self]


_SIGNS = {
    Protection.FAILED: "\N{BALLOT X}",
    Protection.NEVER: "\N{WHITE CIRCLE}",
    Protection.LATE: "\N{BLACK UP-POINTING TRIANGLE}",
    Protection.SAVED: "\N{MIDDLE DOT}",
    Protection.PROTECTED: "\N{BLACK CIRCLE}",
    Protection.WAITING: "\N{MIDDLE DOT}",
    Protection.ENDED: "\N{WHITE SQUARE}",
}

_MISTAKES = ("Busy", "InvalidOption", "NoSuchProcess", "NoSuchImage")
"""Errors that say of a request that it was none to fulfil then, and nothing of the program: one
that is suspended, or that another job works on. Where nothing else is saved the image gets late.
"""

LATE = 1.5
"""Intervals of its schedule after which a program's newest image is late."""
TOLD = 24 * 3600.0
"""For so many seconds after its newest image a program that has ended is told of."""


@dataclass(frozen=True)
class Program:
    """A program: the processes of one name, or one process without a name. One that has ended has
    none.

    ``restarter`` is who would start it again if it, or the node, failed (empty: nobody that phosd
    knows of). ``image`` is its newest, ``every`` the seconds between its periodic checkpoints (0:
    none), ``due`` when the next one is (seconds since the epoch), and ``trouble`` the last job of
    it that failed, if nothing has succeeded since.
    """

    name: str
    user_name: str
    processes: tuple[Process, ...]
    protection: Protection
    restarter: str
    image: Image | None
    every: float
    due: float | None
    trouble: Job | None

    @property
    def device_bytes(self) -> int:
        return sum(each.device_bytes for each in self.processes)

    @property
    def gpus(self) -> tuple[str, ...]:
        """The paths of the GPUs that it uses."""
        return tuple(sorted({path for each in self.processes for path in each.gpus}))

    @property
    def state(self) -> str:
        """What its processes do: what is not ``running`` first."""
        states = sorted({each.state for each in self.processes}, key=lambda s: s == "running")
        return ", ".join(states)

    def overdue(self, now: float) -> float:
        """Return how many seconds ago its next checkpoint was due, if its newest image is late;
        else 0.
        """
        if self.image is None or self.due is None:
            return 0.0
        return now - self.due if _is_late(self.image.created or 0.0, self.every, now) else 0.0


def programs(
    processes: Iterable[Process], images: Iterable[Image], jobs: Iterable[Job], now: float
) -> list[Program]:
    """Return the programs, those that need somebody first. ``now`` in seconds since the epoch."""
    by_id = {image.id: image for image in images}
    about = defaultdict[str, list[Job]](list)
    for job in jobs:
        for target in job.targets:
            about[target].append(job)
    found = [
        _program(group, by_id, [job for each in group for job in about[str(each.pid)]], now)
        for group in _groups(processes)
    ]
    worst = list(Protection)
    return sorted(found, key=lambda each: (worst.index(each.protection), each.name or "~"))


def ended(
    processes: Iterable[Process], images: Iterable[Image], jobs: Iterable[Job], now: float
) -> list[Program]:
    """Return the programs that a schedule saved last, and that run no more, the last first: nobody
    knows whether they have done their work. ``now`` in seconds since the epoch.
    """
    by_id = {image.id: image for image in without_program(processes, images, now)}
    newest = dict[tuple[int, str], tuple[Image, Job]]()
    for job in sorted(jobs, key=lambda each: each.number):
        image = by_id.get(job.result) if job.state == "done" else None
        if image is not None and job.operation == "checkpoint":
            newest[image.owner, image.name or f"/{image.pid}"] = image, job
    found = [
        Program(
            name=image.name,
            user_name=image.owner_name,
            processes=(),
            protection=Protection.ENDED,
            restarter="",
            image=image,
            every=0.0,
            due=None,
            trouble=None,
        )
        for image, job in newest.values()
        if job.scheduled
    ]
    return sorted(found, key=lambda each: each.image.created or 0.0 if each.image else 0.0)[::-1]


def without_program(
    processes: Iterable[Process], images: Iterable[Image], now: float
) -> list[Image]:
    """Return the images whose programs run no more, for as long as these are told of."""
    alive = {(each.user, each.name or f"/{each.pid}") for each in processes}
    return [
        image
        for image in images
        if (image.owner, image.name or f"/{image.pid}") not in alive
        and now - (image.created or 0.0) < TOLD
    ]


def running(found: Iterable[Program]) -> int:
    """Return how many of the programs run, rather than that they have ended or wait in a pool."""
    return sum(each.protection.counts for each in found)


def _groups(processes: Iterable[Process]) -> Iterable[Sequence[Process]]:
    groups = defaultdict[tuple[int, str], list[Process]](list)
    for each in sorted(processes, key=lambda process: process.pid):
        groups[each.user, each.name or f"/{each.pid}"].append(each)
    return groups.values()


def _program(
    group: Sequence[Process], images: Mapping[str, Image], jobs: Sequence[Job], now: float
) -> Program:
    known = [image for each in group if (image := images.get(each.last_image)) is not None]
    image = max(known, key=lambda each: each.created or 0.0, default=None)
    every = min((each.every for each in group if each.every), default=0.0)
    failed = _failed(jobs)
    trouble = max(failed, key=lambda job: job.number, default=None)
    unsaved = any(job.operation == "checkpoint" for job in failed)
    made = image.created if image is not None else None
    protection = _protection(made, every, now, unsaved=unsaved)
    return Program(
        name=group[0].name,
        user_name=group[0].user_name,
        processes=tuple(group),
        protection=Protection.WAITING if all(each.waits for each in group) else protection,
        restarter=next((each.restarter for each in group if each.restarter), ""),
        image=image,
        every=every,
        due=made + every if every and made is not None else None,
        trouble=trouble,
    )


def is_failure(error: str) -> bool:
    """Return whether a job with this error has failed, rather than that it was asked for what
    cannot be.
    """
    return error not in _MISTAKES


def _failed(jobs: Sequence[Job]) -> list[Job]:
    """Return the last job of each kind that failed, if none of its kind has succeeded since."""
    meant = (job for job in jobs if job.over and is_failure(job.error))
    ended = sorted(meant, key=lambda job: job.number)
    last = {job.operation: job for job in ended if job.state in ("done", "failed")}
    return [job for job in last.values() if job.state == "failed"]


def _protection(made: float | None, every: float, now: float, *, unsaved: bool) -> Protection:
    if unsaved:
        return Protection.FAILED
    if made is None:
        return Protection.NEVER
    if not every:
        return Protection.SAVED
    return Protection.LATE if _is_late(made, every, now) else Protection.PROTECTED


def _is_late(made: float, every: float, now: float) -> bool:
    return now - made > LATE * every
