"""The process that waits for a restored program, and ends as that does: ``phos run --resume``.

It is none of the program's ancestors, and seldom in its cgroup. The parent that phosd gives the
program tells it, in its own command line, for as long as the program runs.
"""

from contextlib import suppress

from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId

_MARK = "phos-follower="


def of_user(pid: int, uid: int) -> ProcessId | None:
    """Return process ``pid`` if it is user ``uid``'s; None if it is another's, or has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        found = procfs.process_id(pid)
        return found if {*procfs.status(pid).uids} == {uid} else None
    return None


def word(follower: ProcessId | None) -> str:
    """Return the word of a command line that tells the follower of the command's children."""
    return f"{_MARK}{follower.pid}:{follower.start_time}" if follower is not None else _MARK


def follower_of(pid: int) -> ProcessId | None:
    """Return the process that waits for the restored program of process ``pid``; None if nobody
    does, or it has ended.
    """
    found = procfs.stat(pid)
    while found is not None and found.parent > 0:
        with suppress(OSError):  # it has ended, or nobody may look
            for each in procfs.command_line(found.parent):
                if each.startswith(_MARK):
                    return _running(each.removeprefix(_MARK))
        found = procfs.stat(found.parent)
    return None


def _running(told: str) -> ProcessId | None:
    pid, _, start_time = told.partition(":")
    if not (told.isascii() and pid.isdecimal() and start_time.isdecimal()):
        return None
    follower = ProcessId(int(pid), int(start_time))
    return follower if procfs.process_id(follower.pid) == follower else None
