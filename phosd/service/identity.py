"""Who a process is, at the moment when a caller names its pid."""

from dataclasses import dataclass

from phosd.engine import procfs
from phosd.engine.errors import NoSuchProcess
from phosd.engine.tree import require_process


@dataclass(frozen=True)
class Identity:
    """A process of this boot. ``start_time`` is in clock ticks since the boot."""

    pid: int
    start_time: int
    uid: int


def identify(pid: int) -> Identity:
    """The process that has this pid now. ``uid`` is 0 when its user ids differ (a set-uid program).

    Raises :class:`NoSuchProcess` when there is none, or only a zombie or a thread.
    """
    found = procfs.stat(pid)
    try:
        status = procfs.status(pid)
    except (FileNotFoundError, ProcessLookupError):
        found = None
    if found is None:
        raise NoSuchProcess(f"there is no process {pid}", hint="`phos ps` lists the GPU processes")
    if found.dead:
        raise NoSuchProcess(
            f"process {pid} has ended and waits for its parent, {found.parent}, to notice",
            hint="there is nothing left of it to save",
        )
    require_process(pid, status)
    uids = set(status.uids)
    return Identity(pid, found.start_time, uids.pop() if len(uids) == 1 else 0)


def executable(pid: int) -> str:
    """The file that a process runs, and with it the name of its program; empty when it is gone."""
    try:
        return str((procfs.PROC / str(pid) / "exe").readlink())
    except (FileNotFoundError, ProcessLookupError):
        return ""


def ancestors(pid: int) -> set[int]:
    """The pids above a process, its own included."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        process = procfs.stat(pid)
        pid = process.parent if process else 0
    return found
