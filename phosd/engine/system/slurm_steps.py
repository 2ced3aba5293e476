"""Tell which step of a Slurm job a process is in, by the cgroup that slurmstepd gave it.

Processes may set any environment, and are in the cgroup of their step as long as they live. Where
Slurm tracks them by something else (``ProctrackType``) they are in none of its cgroups.
"""

import re
from dataclasses import dataclass

from phosd.engine.system import cgroups

_STEP = re.compile(
    r"(?:/system\.slice)?/(?:slurm[^/]*/uid_\d+|[^/]*slurmstepd\.scope)/job_(\d+)/step_(\w+)(?:/.*)?"
)
"""``/slurm_NODE/uid_1000/job_1/step_0`` in a v1 hierarchy, in the unified one
``/system.slice/slurmstepd.scope/job_1/step_0``; what is below belongs to the step. Root makes
these: elsewhere users may have been given cgroups, in which they choose the names.
"""


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
