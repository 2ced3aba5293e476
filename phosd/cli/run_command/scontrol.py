"""Ask Slurm's controller, by ``scontrol`` and ``scancel``."""

import os
import re
import subprocess
from collections.abc import Mapping


class SlurmError(Exception):
    """Slurm does not tell, or refuses; the text says why."""


def address_of(job: str) -> str:
    """Return what the controller knows the job of this process by, whose id is ``job``, and no
    other: the id of one job of an array is that of the array, too.
    """
    array, task = (os.environ.get(f"SLURM_ARRAY_{name}") for name in ("JOB_ID", "TASK_ID"))
    return f"{array}_{task}" if array and task else job


def scontrol(*words: str, seconds: float) -> str:
    """Return what ``scontrol`` prints within ``seconds``. Raises :class:`SlurmError`."""
    return _run("scontrol", *words, seconds=seconds)


def end_script(job: str, *, seconds: float) -> None:
    """Send SIGTERM to the script of a job, and to no other step. Raises :class:`SlurmError`."""
    _run("scancel", "--batch", "--signal=TERM", job, seconds=seconds)


def release(*, seconds: float) -> tuple[int, int]:
    """Return the controller's release, such as (24, 11). Raises :class:`SlurmError`."""
    config = scontrol("show", "config", seconds=seconds)
    found = re.search(r"^SLURM_VERSION\s*=\s*(\d+)\.(\d+)", config, re.MULTILINE)
    if found is None:
        raise SlurmError("`scontrol show config` has no SLURM_VERSION")
    return int(found[1]), int(found[2])


def _run(program: str, *words: str, seconds: float) -> str:
    try:
        return subprocess.run(
            [program, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=True,
            env=os.environ | {"SLURM_TIME_FORMAT": "standard"},
        ).stdout
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").strip().partition("\n")[0]
        raise SlurmError(said or f"`{program}` ended with {error.returncode}") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"`{program}` takes over {seconds:.0f} s") from error
    except OSError as error:
        raise SlurmError(f"`{program}` cannot be run: {error.strerror}") from error


def job_fields(job: str, *, seconds: float) -> dict[str, str]:
    """Return what ``scontrol show job`` tells of a job. Raises :class:`SlurmError`."""
    return dict(re.findall(r"(\w+)=(\S+)", scontrol("show", "job", job, seconds=seconds)))


def is_preempted(fields: Mapping[str, str]) -> bool:
    """Return whether a job with these :func:`job_fields` is in the grace of its preemption."""
    # Where no job is ever preempted there is no such field.
    return fields.get("PreemptTime", "None") != "None"
