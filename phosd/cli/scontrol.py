"""Ask Slurm's controller, by ``scontrol``."""

import os
import re
import subprocess


class SlurmError(Exception):
    """Slurm does not tell, or refuses; the text says why."""


def scontrol(*words: str, seconds: float) -> str:
    """Return what ``scontrol`` prints within ``seconds``. Raises :class:`SlurmError`."""
    try:
        return subprocess.run(
            ["scontrol", *words],
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
        raise SlurmError(said or f"`scontrol` ended with {error.returncode}") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"`scontrol` takes over {seconds:.0f} s") from error
    except OSError as error:
        raise SlurmError(f"`scontrol` cannot be run: {error.strerror}") from error


def job_fields(job: str, *, seconds: float) -> dict[str, str]:
    """Return what ``scontrol show job`` tells of a job. Raises :class:`SlurmError`."""
    return dict(re.findall(r"(\w+)=(\S+)", scontrol("show", "job", job, seconds=seconds)))
