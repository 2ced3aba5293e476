"""A cgroup as Slurm makes one for a step, without Slurm."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from phosd.engine.system import cgroups
from tests.support.harness import wait_until


@contextmanager
def in_step(pid: int, job: int) -> Iterator[None]:
    """Put a process into step 0 of a job, as Slurm does; it has to end inside the context."""
    mine = cgroups.memberships(os.getpid())
    names = [name for name in mine if "freezer" in name.split(",")]
    name = names[0] if names else cgroups.UNIFIED
    step = cgroups.folder(name, f"/phos-test-{pid}-slurmstepd.scope/job_{job}/step_0")
    assert step is not None
    step.mkdir(parents=True)
    try:
        (step / "cgroup.procs").write_text(str(pid))
        yield
        wait_until(lambda: not (step / "cgroup.procs").read_text(), "the step's end")
    finally:
        for folder in (step, *step.parents[:2]):
            folder.rmdir()
