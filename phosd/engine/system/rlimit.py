"""Read the limits of processes, and raise phosd's own of open files, since parked memory takes a
descriptor for each block.
"""

import fcntl
import os
import resource

from phosd.engine.system import procfs

_LIMIT_NAME = 26
"""Columns of a limit's name."""
_ROOM = 16 << 10
"""Descriptors for which there is room from the beginning."""


def allow_many_descriptors() -> None:
    """Raise this process's limit to the hard one (a PyTorch process of 39 GB has 1,170 blocks), and
    have the kernel make room for many.

    Where there are several threads the kernel waits for all processors (``synchronize_rcu``, 25 ms)
    whenever it needs more room: in the middle of a stop.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    room = _ROOM if most == resource.RLIM_INFINITY else min(most, _ROOM)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.close(fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, room - 1))
    finally:
        os.close(null)


def limits(pid: int) -> dict[int, tuple[int, int]]:
    """Return the soft and hard limits of a process by their numbers (``RLIMIT_CPU`` and so on); -1
    is none.

    Raises :class:`ProcessLookupError` or :class:`FileNotFoundError` if it has ended.
    """
    rows = procfs.lines(procfs.PROC / str(pid) / "limits")[1:-1]  # in the order of the numbers
    words = (row[_LIMIT_NAME:].split() for row in rows)
    return {n: (_limit(soft), _limit(hard)) for n, (soft, hard, *_) in enumerate(words)}


def _limit(text: str) -> int:
    return -1 if text == "unlimited" else int(text)
