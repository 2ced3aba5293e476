"""Tell which step of a Slurm job a process is in, by the cgroup that slurmstepd gave it.

Processes may set any environment, and are in the cgroup of their step as long as they live. Where
Slurm tracks them by something else (``ProctrackType``) they are in none of its cgroups.
"""

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.system import cgroups

_STEP = re.compile(
    r"(?:/system\.slice)?/(?:slurm[^/]*/uid_\d+|[^/]*slurmstepd\.scope)/job_(\d+)/step_(\w+)(?:/.*)?"
)
"""``/slurm_NODE/uid_1000/job_1/step_0`` in a v1 hierarchy, in the unified one
``/system.slice/slurmstepd.scope/job_1/step_0``; what is below belongs to the step. Root makes
these: elsewhere users may have been given cgroups, in which they choose the names.
"""

_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class SlurmStep:
    """A step by the number of its job and its own name: a number, ``batch``, ``interactive``."""

    job: int
    name: str

    def __str__(self) -> str:
        return f"{self.job}.{self.name}"


def step_of(pid: int) -> SlurmStep | None:
    """Return the step that a process is in; None if it is in none, or has ended."""
    for path in cgroups.memberships(pid).values():
        if found := _STEP.fullmatch(path):
            return SlurmStep(int(found[1]), found[2])
    return None


def run_of(paths: Mapping[str, str]) -> str:
    """Return an id of the step that these cgroups, by hierarchy, are of; empty if they are of none
    that exists.

    Slurm gives the numbers of jobs again, and slurmstepd's unit is that of all jobs. The kernel
    gives the number of a cgroup's folder to no other one until the machine is booted anew.
    """
    for hierarchy, path in paths.items():
        step = _STEP.fullmatch(path)
        place = cgroups.folder(hierarchy, path[: step.end(2)]) if step else None
        if place is not None:
            with contextlib.suppress(FileNotFoundError):
                return str(place.stat().st_ino)
    return ""


@contextlib.contextmanager
def kept_thawed(pid: int) -> Iterator[None]:
    """Keep the step of a process running inside the context, also if Slurm suspends it meanwhile,
    which freezes it: who is frozen cannot leave a GPU. It stays thawed: Slurm may have resumed it
    since, and would not thaw it again.

    Does nothing for a process that is in no step.
    """
    places = _freezable(pid)
    over = threading.Event()

    def watch() -> None:
        while True:
            for place in places:
                with contextlib.suppress(FileNotFoundError):  # the step has ended
                    cgroups.thaw(place)
            if over.wait(_LOOK_SECONDS):
                return

    if not places:
        yield
        return
    watcher = threading.Thread(target=watch, name=f"thaw-{pid}")
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _freezable(pid: int) -> list[Path]:
    """The folders of the cgroups that freeze a process, up to that of its step."""
    found = []
    for hierarchy, path in cgroups.memberships(pid).items():
        step = _STEP.fullmatch(path)
        may_freeze = hierarchy == cgroups.UNIFIED or "freezer" in hierarchy.split(",")
        if step is None or not may_freeze:
            continue
        top = path[: step.end(2)]
        if cgroups.is_own(path):  # frozen by phosd, which thaws it itself
            path = path.rpartition("/")[0]
        while path.startswith(top):
            if (place := cgroups.folder(hierarchy, path)) is not None:
                found.append(place)
            path = path.rpartition("/")[0]
    return found
