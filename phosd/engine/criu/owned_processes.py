"""Which processes are CRIU's: itself, and what it has made. A pid says nothing about that.

An id that was free before a restore may be anybody's when it fails.
"""

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

from phosd.engine.image.manifest import Process
from phosd.engine.system import procfs
from phosd.engine.system.privileges import Capability

ENDING_PATIENCE = 10.0
"""Seconds for killed processes to give back their memory, and for a parent to collect them."""

_RESTORE = {"restore", "--no-default-config", "--restore-detached"}
"""What phosd says to a CRIU that restores. No other one is to be ended by us."""
_NOT_A_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)
"""What ``pidfd_open(2)`` says to an id that nobody or a mere thread has, by kernel."""


def is_criu(pid: int) -> bool:
    """Whether it is CRIU with the rights that phosd gives it.

    A command line tells nothing, and neither do capabilities alone: whoever has a user namespace
    has them in it, and there are programs that run as root for whoever starts them (su).
    """
    with contextlib.suppress(OSError):  # it has ended
        status = procfs.status(pid)
        has = bool(status.capabilities >> Capability.CHECKPOINT_RESTORE & 1)
        trusted = status.uids[0] == 0 or has
        ours = procfs.namespace(pid, "user") == procfs.namespace(os.getpid(), "user")
        return trusted and ours and _is_named_criu(_executable(pid))
    return False


def restores(pid: int) -> bool:
    """Whether it is of a CRIU that restores a program for a phosd, and no part of it yet."""
    with contextlib.suppress(OSError):  # it has ended
        return _RESTORE.issubset(procfs.command_line(pid)) and is_criu(pid)
    return False


def is_left_over(pid: int, since: int) -> bool:
    """Whether a CRIU that was killed has left it behind: whoever leads its session has ended.

    It is no part of any program, and may stand still for ever: CRIU stops children of its own to
    find out what the kernel can do. ``since`` is when the restore began, in clock ticks since boot.
    """
    found = procfs.stat(pid)
    if found is None or found.dead or found.start_time < since or not restores(pid):
        return False
    leader = procfs.stat(found.session)
    return found.session > 0 and (leader is None or leader.dead)


def end_left_over(since: int) -> None:
    """SIGKILL to all that :func:`is_left_over`, and wait until they have ended."""
    left = [pid for pid in procfs.pids() if is_left_over(pid, since)]
    end(left, lambda pid: is_left_over(pid, since))


def is_made(process: Process, user: int, since: int) -> bool:
    """Whether the process that has this pid now was made by a CRIU that restores as ``user``.

    ``since`` is when the restore began, in clock ticks since boot.
    """
    found = procfs.stat(process.pid)
    if found is None or found.dead or found.start_time < since:
        return False
    with contextlib.suppress(OSError):  # it has ended
        executable = _executable(process.pid)
        known = str(executable) == process.executable or (
            # One that dumps belongs to another job, and could take its program along.
            _is_named_criu(executable) and "dump" not in procfs.command_line(process.pid)
        )
        return known and procfs.status(process.pid).uids[0] in (user, process.uid)
    return False


def end(pids: Collection[int], ours: Callable[[int], bool]) -> None:
    """SIGKILL to those of the processes that are ``ours``, and wait until they have ended.

    Whoever gets the pid between the question and the signal is not hit.
    """
    give_up = time.monotonic() + ENDING_PATIENCE
    while time.monotonic() < give_up:
        with contextlib.ExitStack() as stack:
            killed = [pid for pid in pids if _kill(pid, ours, give_up, stack)]
        if not killed:  # nor is there anybody left who could make another one
            return


def _kill(
    pid: int, ours: Callable[[int], bool], give_up: float, waits: contextlib.ExitStack
) -> bool:
    """Whether it was one of ours; ``waits`` ends when it has."""
    try:
        held = os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NOT_A_PROCESS:
            return False
        raise
    waits.callback(os.close, held)
    if not ours(pid):
        return False
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(held, signal.SIGKILL)
    waits.callback(_wait, held, give_up)
    return True


def _wait(held: int, give_up: float) -> None:
    poller = select.poll()
    poller.register(held, select.POLLIN)
    poller.poll(max(0.0, give_up - time.monotonic()) * 1000)


def _executable(pid: int) -> Path:
    return (procfs.PROC / str(pid) / "exe").readlink()


def _is_named_criu(executable: Path) -> bool:
    """Wherever it lies, and also when it was replaced since (``criu (deleted)``)."""
    return "criu" in executable.name
