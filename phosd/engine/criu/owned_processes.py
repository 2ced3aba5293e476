"""Find and kill the processes that belong to CRIU, or that it restored, never by pid alone.

A pid that was free before a restore may be anyone's when the restore fails.
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
"""Seconds for killed processes to free their memory, and for parents to reap them."""

_RESTORE = {"restore", "--no-default-config", "--restore-detached"}
"""The options of phosd's restores. No other CRIU is killed."""
_NOT_A_PROCESS = (errno.ESRCH, errno.EINVAL, errno.ENOENT)
"""Errors of ``pidfd_open(2)`` for a free id or one of a mere thread, by kernel version."""


def is_criu(pid: int) -> bool:
    """Return whether a process is CRIU, with the rights that phosd gives it.

    A command line proves nothing. Nor do capabilities, since any user has them in a user namespace,
    nor root, since some programs run as root for everyone (su).
    """
    with contextlib.suppress(OSError):  # the process has ended
        status = procfs.status(pid)
        has = bool(status.capabilities >> Capability.CHECKPOINT_RESTORE & 1)
        trusted = status.uids[0] == 0 or has
        ours = procfs.namespace(pid, "user") == procfs.namespace(os.getpid(), "user")
        return trusted and ours and _is_named_criu(_executable(pid))
    return False


def restores(pid: int) -> bool:
    """Return whether a process is CRIU's own in a restore, not yet the restored program."""
    with contextlib.suppress(OSError):  # the process has ended
        return _RESTORE.issubset(procfs.command_line(pid)) and is_criu(pid)
    return False


def is_left_over(pid: int, since: int) -> bool:
    """Return whether a killed CRIU left this process behind: its session leader has ended.

    Such a process is no part of a program and may be stopped for ever: CRIU stops children of its
    own to test what the kernel supports. ``since`` is the start of the restore in clock ticks since
    boot.
    """
    found = procfs.stat(pid)
    if found is None or found.dead or found.start_time < since or not restores(pid):
        return False
    leader = procfs.stat(found.session)
    return found.session > 0 and (leader is None or leader.dead)


def end_left_over(since: int) -> None:
    """Kill all processes for which :func:`is_left_over` is true, and wait until they have ended."""
    left = [pid for pid in procfs.pids() if is_left_over(pid, since)]
    end(left, lambda pid: is_left_over(pid, since))


def carries(pid: int, mark: str) -> bool:
    """Return whether a process has this ``NAME=VALUE`` in the environment that it began with."""
    with contextlib.suppress(OSError):  # the process has ended
        return mark.encode() in (procfs.PROC / str(pid) / "environ").read_bytes().split(b"\0")
    return False


def is_made(process: Process, user: int, since: int) -> bool:
    """Return whether the process with this pid was created by a CRIU that restores as ``user``.

    ``since`` is the start of the restore in clock ticks since boot.
    """
    found = procfs.stat(process.pid)
    if found is None or found.dead or found.start_time < since:
        return False
    with contextlib.suppress(OSError):  # the process has ended
        executable = _executable(process.pid)
        known = str(executable) == process.executable or (
            # A CRIU that dumps belongs to another job; killing it could kill its program.
            _is_named_criu(executable) and "dump" not in procfs.command_line(process.pid)
        )
        return known and procfs.status(process.pid).uids[0] in (user, process.uid)
    return False


def kill(pids: Collection[int], ours: Callable[[int], bool]) -> None:
    """Kill those processes that are ``ours``, and do not wait for their end."""
    with contextlib.ExitStack() as stack:
        for pid in pids:
            _kill(pid, ours, 0.0, stack)


def end(pids: Collection[int], ours: Callable[[int], bool]) -> None:
    """Kill those processes that are ``ours``, and wait until they have ended.

    Uses pidfds: a process that gets the pid between check and signal is not killed.
    """
    give_up = time.monotonic() + ENDING_PATIENCE
    while time.monotonic() < give_up:
        with contextlib.ExitStack() as stack:
            killed = [pid for pid in pids if _kill(pid, ours, give_up, stack)]
        if not killed:  # nor is any process left that could create another
            return


def _kill(
    pid: int, ours: Callable[[int], bool], give_up: float, waits: contextlib.ExitStack
) -> bool:
    """Kill a process if it is ours; return whether it was. ``waits`` ends when it has ended."""
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
    """Return whether the file is named CRIU, also if replaced (``criu (deleted)``)."""
    return "criu" in executable.name
