"""How long saving may take on SIGTERM: until whoever has sent it sends SIGKILL."""

import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

from phosd.cli.run_command.scontrol import (
    SlurmError,
    address_of,
    is_preempted,
    job_fields,
    scontrol,
)
from phosd.units import duration

DEFAULT = 90.0
"""Seconds if nobody tells: systemd's own default."""
SLURM_DEFAULT = 30.0
"""Seconds in a job of Slurm that does not tell: the default of its KillWait."""
_SYSTEMD_SECONDS = 5.0
_SLURM_SECONDS = 2.0
"""How long its controller may take to answer: once SIGTERM has come, saving waits for that."""


@dataclass(frozen=True)
class Grace:
    """The ``seconds`` that are certain, and those that ``more`` finds on top when SIGTERM has come,
    or :class:`SlurmError`.
    """

    seconds: float
    more: Callable[[], float] = float


def grace_of(given: float | None, note: Callable[[str], None]) -> Grace:
    """Return what is ``given``, or what Slurm or systemd gives this process; ``note`` is told when
    that cannot be found out.
    """
    if given is not None:
        return Grace(given)
    if job := os.environ.get("SLURM_JOB_ID"):
        return _slurm_grace(job, note)
    return Grace(_systemd_grace() or DEFAULT)


def _slurm_grace(job: str, note: Callable[[str], None]) -> Grace:
    """Return the grace of a job: whatever ends it, Slurm sends SIGTERM, and SIGKILL after KillWait.

    A job that is preempted gets its SIGTERM earlier by the GraceTime of its partition or QOS.
    """
    try:
        return Grace(_kill_wait(), partial(_until_preempted_job_ends, job))
    except SlurmError as why:
        note(
            f"phos: how long Slurm waits before it kills is not known ({why}), so saving may take "
            f"{SLURM_DEFAULT:.0f} s, as is usual; `--grace` says otherwise"
        )
        return Grace(SLURM_DEFAULT)


def _kill_wait() -> float:
    """Return Slurm's KillWait in seconds."""
    config = scontrol("show", "config", seconds=_SLURM_SECONDS)
    found = re.search(r"^KillWait\s*=\s*(\d+) sec", config, re.MULTILINE)
    if found is None:
        raise SlurmError("`scontrol show config` has no KillWait")
    return float(found[1])


def _until_preempted_job_ends(job: str) -> float:
    """Return the seconds from now to the end of a job that is preempted, after which KillWait
    begins; 0 if it is not.
    """
    fields = job_fields(address_of(job), seconds=_SLURM_SECONDS)
    if not is_preempted(fields):
        return 0.0
    try:
        if fields["EndTime"] == "Unknown":  # of a job without a time limit
            grace = timedelta(seconds=_partition_grace(fields["Partition"]))
            end = datetime.fromisoformat(fields["PreemptTime"]) + grace
        else:
            end = datetime.fromisoformat(fields["EndTime"])
    except (KeyError, ValueError):
        raise SlurmError(f"`scontrol show job {job}` has no EndTime") from None
    now = datetime.now()
    return max((end - now).total_seconds(), 0.0)


def _partition_grace(partition: str) -> float:
    """Return the GraceTime of a partition in seconds. That of a QOS is not told."""
    told = scontrol("show", "partition", partition, seconds=_SLURM_SECONDS)
    found = re.search(r"\bGraceTime=(\d+)", told)
    if found is None:
        raise SlurmError(f"`scontrol show partition {partition}` has no GraceTime")
    return float(found[1])


def _systemd_grace() -> float | None:
    """Return the seconds that systemd gives the unit of this process to stop; None outside of a
    service, or where systemd does not tell.
    """
    if "INVOCATION_ID" not in os.environ:
        return None
    try:
        places = Path("/proc/self/cgroup").read_text()
        units = re.findall(r"/([^/\n]+\.(?:service|scope))$", places, re.MULTILINE)
        if not units:
            return None
        manager = ["--user"] if "/user@" in places else []
        words = ["systemctl", *manager, "show", "--property=TimeoutStopUSec", "--value", units[-1]]
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_SYSTEMD_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return duration(done.stdout.strip())
