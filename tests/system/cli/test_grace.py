"""How long saving may take: what Slurm and systemd tell, and what comes of it when they do not."""

import os
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from phosd.cli.run_command import grace as grace_module
from phosd.cli.run_command.grace import Grace, grace_of
from phosd.cli.run_command.scontrol import SlurmError

CONFIG = """\
Configuration data as of 2026-11-25T20:41:21
JobRequeue              = 1
KillOnBadExit           = 0
KillWait                = 47 sec
LaunchParameters        = (null)
UnkillableStepTimeout   = 60 sec

Slurmctld(primary) at head is UP
"""
JOB = """\
JobId=4711 JobName=bert
   UserId=alice(1000) GroupId=alice(1000) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   RunTime=03:27:07 TimeLimit=1-12:00:00 TimeMin=N/A
   StartTime=2026-11-25T17:20:00 EndTime={end} Deadline=N/A
   Partition=low AllocNode:Sid=head:1234
   PreemptEligibleTime=2026-11-25T17:20:00 PreemptTime={preempted}
   SuspendTime=None SecsPreSuspend=0 LastSchedEval=2026-11-25T17:20:00 Scheduler=Backfill
   Command=/home/alice/train.sh
"""
SCONTROL = """\
#!/bin/sh
[ "$SLURM_TIME_FORMAT" = standard ] || exit 9
case "$*" in
    "show config") cat "$(dirname "$0")/config" ;;
    "show job 4711") cat "$(dirname "$0")/job" ;;
    "show partition low") echo "   ExclusiveUser=NO GraceTime=60 Hidden=NO" ;;
    *) echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1 ;;
esac
"""


def slurm(
    folder: Path, *, preempted: str = "None", end: str = "2026-11-27T05:20:00"
) -> dict[str, str]:
    """Make a ``scontrol`` that answers as Slurm's does; the environment of a job there."""
    scontrol = folder / "scontrol"
    scontrol.write_text(SCONTROL)
    scontrol.chmod(0o755)
    (folder / "config").write_text(CONFIG)
    (folder / "job").write_text(JOB.format(preempted=preempted, end=end))
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_TIME_FORMAT": "relative",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }


def found(
    patch: pytest.MonkeyPatch, variables: dict[str, str], given: float | None = None
) -> tuple[Grace, str]:
    """The grace in an environment, and what was said of it."""
    for name, value in variables.items():
        patch.setenv(name, value)
    said: list[str] = []
    return grace_of(given, said.append), "\n".join(said)


@pytest.mark.parametrize(
    ("preempted", "left", "least", "most"),
    [
        ("None", 3600, 0, 0),
        ("2026-11-25T20:47:07", 3600, 3300, 3600),
        ("2026-11-25T20:47:07", -9, 0, 0),
    ],
)
def test_a_job_of_slurm(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    preempted: str,
    left: int,
    least: float,
    most: float,
) -> None:
    """It has KillWait, and if it was preempted until its end before that."""
    end = (datetime.now() + timedelta(seconds=left)).isoformat(timespec="seconds")
    grace, said = found(monkeypatch, slurm(tmp_path, preempted=preempted, end=end))
    assert (grace.seconds, said) == (47.0, "")
    assert least <= grace.more() <= most
    grace, said = found(monkeypatch, {}, given=5.0)
    assert (grace, said) == (Grace(5.0), "")


def test_a_job_without_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm does not tell its end, also not while it is preempted."""
    now = datetime.now().isoformat(timespec="seconds")
    grace, _ = found(monkeypatch, slurm(tmp_path, preempted=now, end="Unknown"))
    assert 30 <= grace.more() <= 60


def test_a_job_of_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last job has the id of the array, by which Slurm tells of all of them."""
    end = (datetime.now() + timedelta(seconds=3600)).isoformat(timespec="seconds")
    variables = slurm(tmp_path, preempted="2026-11-25T20:47:07", end=end)
    variables |= {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}
    told = SCONTROL.replace(
        '"show job 4711")', '"show job 4711_3") cat "$(dirname "$0")/job" ;;\n    "show job 4711")'
    ).replace('"show job 4711") cat "$(dirname "$0")/job"', '"show job 4711") exit 9')
    (tmp_path / "scontrol").write_text(told)
    grace, _ = found(monkeypatch, variables)
    assert 3300 <= grace.more() <= 3600


def test_a_slurm_that_preempts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = slurm(tmp_path)
    (tmp_path / "job").write_text("JobId=4711 JobName=bert\n   SuspendTime=None\n")
    grace, _ = found(monkeypatch, variables)
    assert grace.more() == 0.0


@pytest.mark.parametrize(
    ("scontrol", "why"),
    [
        (None, "cannot be run: No such file"),
        ("#!/bin/sh\necho 'slurm_load_ctl_conf error: Unable to contact' >&2; exit 1", "contact"),
        ("#!/bin/sh\necho KillWait = soon", "has no KillWait"),
        ("#!/bin/sh\nexec sleep 60", "takes over"),
    ],
)
def test_a_slurm_that_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scontrol: str | None, why: str
) -> None:
    monkeypatch.setattr(grace_module, "_SLURM_SECONDS", 1.0 if why == "takes over" else 60.0)
    variables = slurm(tmp_path)
    if scontrol is None:
        variables["PATH"] = str(tmp_path)
        (tmp_path / "scontrol").unlink()
    else:
        (tmp_path / "scontrol").write_text(scontrol)
    grace, said = found(monkeypatch, variables)
    assert grace.seconds == 30.0
    assert why in said
    assert "`--grace` says otherwise" in said


@pytest.mark.parametrize(
    ("variables", "end"), [({"SLURM_JOB_ID": "1"}, ""), ({}, "soon"), ({}, "")]
)
def test_a_job_of_which_slurm_knows_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], end: str
) -> None:
    there = slurm(tmp_path, preempted="2026-11-25T20:47:07", end=end)
    grace, _ = found(monkeypatch, there | variables)
    assert grace.seconds == 47.0
    with pytest.raises(SlurmError, match=r"no EndTime|Invalid job id"):
        grace.more()
