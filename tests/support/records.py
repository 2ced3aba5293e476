"""Progress of a job whose record names what the job touches, as that of an operation does."""

from phosd.engine.job.affected import AffectedProcess, AffectedSet
from phosd.engine.job.progress import Progress


def naming(*pids: int) -> Progress:
    """Return a new progress; its record names these processes."""
    progress = Progress()
    processes = (AffectedProcess(pid, 0, gpu=True, hooked=True) for pid in pids)
    progress.about_to_touch(AffectedSet(tuple(processes), ()))
    return progress
