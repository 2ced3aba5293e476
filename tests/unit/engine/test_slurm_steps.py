"""The step of a process, by its cgroups; and a process in whose cgroups a program may go on."""

import os

import pytest

from phosd.engine.criu.run import cgroup_place
from phosd.engine.system import cgroups
from phosd.engine.system.slurm_steps import step_of
from phosd.errors import NoSuchProcess, NotAuthorized


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("/slurm_gpu7/uid_1000/job_4711/step_0/task_0", "4711.0"),
        ("/slurm/uid_0/job_1/step_batch", "1.batch"),
        ("/system.slice/slurmstepd.scope/job_12/step_3/user/task_0", "12.3"),
        ("/system.slice/gpu7_slurmstepd.scope/job_12/step_extern/user", "12.extern"),
        ("/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_12/step_3", "None"),
        ("/slurm/uid_0/job_1", "None"),
        ("/", "None"),
    ],
)
def test_which_step(monkeypatch: pytest.MonkeyPatch, path: str, step: str) -> None:
    """Users choose the names of cgroups below those that they were given."""
    monkeypatch.setattr(cgroups, "memberships", lambda _pid: {"": "/", "freezer": path})
    assert str(step_of(1)) == step


def test_in_whose_cgroups_a_program_may_go_on() -> None:
    own = os.getpid()
    assert cgroup_place.of_process(own, os.geteuid()).paths == cgroups.memberships(own)
    with pytest.raises(NotAuthorized, match="is not of its user 4711"):
        cgroup_place.of_process(own, 4711)
    with pytest.raises(NoSuchProcess, match="has ended"):
        cgroup_place.of_process((1 << 31) - 1, os.geteuid())
