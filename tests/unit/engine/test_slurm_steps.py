"""The step of a process, by its cgroups; and a process in whose cgroups a program may go on."""

import os
from pathlib import Path

import pytest

from phosd.engine.criu.run import cgroup_place
from phosd.engine.system import cgroups
from phosd.engine.system.slurm_steps import kept_thawed, step_of
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


def test_what_phosd_has_frozen_is_not_thawed_with_the_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A resumption thaws a hollow program when it needs it, and not before."""
    step = "/slurm/uid_0/job_1/step_0"
    frozen = {"freezer": f"{step}/phos-20260101T000000-0a0b"}
    monkeypatch.setattr(cgroups, "memberships", lambda _pid: frozen)
    monkeypatch.setattr(cgroups, "folder", lambda _name, path: tmp_path / path[1:])
    (tmp_path / step[1:]).mkdir(parents=True)
    thawed: list[Path] = []
    monkeypatch.setattr(cgroups, "thaw", thawed.append)
    with kept_thawed(1):
        pass
    assert {*thawed} == {tmp_path / step[1:]}


def test_in_whose_cgroups_a_program_may_go_on() -> None:
    own = os.getpid()
    assert cgroup_place.of_process(own, os.geteuid()).paths == cgroups.memberships(own)
    with pytest.raises(NotAuthorized, match="is not of its user 4711"):
        cgroup_place.of_process(own, 4711)
    with pytest.raises(NoSuchProcess, match="has ended"):
        cgroup_place.of_process((1 << 31) - 1, os.geteuid())
