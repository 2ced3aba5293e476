"""Find and kill the processes that belong to CRIU, or that it restored, never by pid alone.

A pid that was free before a restore may be anyone's when the restore fails.
"""

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from phosd.engine.image.manifest import Process
from phosd.engine.system import procfs
from phosd.engine.system.privileges import Capability
from phosd.engine.system.unkillable_reads import ABANDONABLE_THREADS
from phosd.engine.system.variables import variable

ENDING_TIMEOUT = 10.0
"""Seconds for killed processes to free their memory, and for parents to reap them."""

_RESTORE_MARK = "PHOS_RESTORE"
_DUMP_MARK = "PHOS_DUMP"
_DELETED = " (deleted)"
_FAKE_LINK = ".cr_link"
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


def restore_mark(what: str) -> dict[str, str]:
    """Return the environment of a CRIU that restores a tree: that of a pid, or the one in the pid
    namespace of a name.

    All processes of CRIU's own keep it, helpers included. A restored process has the environment
    with which it was saved.
    """
    return {_RESTORE_MARK: what}


def dump_mark(root: int) -> dict[str, str]:
    """Return the environment of a CRIU that dumps the tree of ``root``. Helpers keep it."""
    return {_DUMP_MARK: str(root)}


def end_orphans() -> None:
    """Kill the helpers of each CRIU that phosd started and that was killed while it began to dump.

    CRIU tries out what the kernel can do on a child that sleeps for ever, with CRIU's own command
    line (``fork_and_ptrace_attach`` in CRIU's util.c). It would be taken for a dump under way.
    """
    orphans = [pid for pid, is_one in ABANDONABLE_THREADS.each(procfs.pids(), _is_orphan) if is_one]
    end(orphans, _is_orphan)


@contextlib.contextmanager
def without_orphans() -> Iterator[None]:
    """Kill such helpers if what runs in the context fails."""
    try:
        yield
    except BaseException:
        end_orphans()
        raise


def _is_orphan(pid: int) -> bool:
    found = procfs.stat(pid)
    if found is None or found.dead or found.session == pid:
        return False
    leader = procfs.stat(found.session)  # phosd starts each CRIU in a session of its own
    gone = leader is None or leader.dead
    return gone and is_criu(pid) and carried(pid, _DUMP_MARK) is not None


def end_restoring(trees: Collection[str], since: int) -> None:
    """Kill each CRIU that restores one of these trees, with its helpers; wait until all have ended.

    Trees are as :func:`restore_mark` takes them. Helpers may be stopped for ever, or wait for ever,
    and a session may be theirs. ``since`` is the start of the restore in clock ticks since boot.
    """

    def restoring(pid: int) -> bool:
        found = procfs.stat(pid)
        if found is None or found.dead or found.start_time < since:
            return False
        return carried(pid, _RESTORE_MARK) in trees

    give_up = time.monotonic() + ENDING_TIMEOUT
    while left := [pid for pid, ours in ABANDONABLE_THREADS.each(procfs.pids(), restoring) if ours]:
        end(left, restoring)
        if time.monotonic() > give_up:
            return


def carried(pid: int, name: str) -> str | None:
    """Return the value of a variable in the environment that a process began with, if it has it."""
    with contextlib.suppress(OSError):  # the process has ended
        value = variable(pid, name)
        return None if value is None else value.decode(errors="replace")
    return None


def is_made(process: Process, user: int, since: int) -> bool:
    """Return whether the process with this pid was created by a CRIU that restores as ``user``.

    ``since`` is the start of the restore in clock ticks since boot.
    """
    found = procfs.stat(process.pid)
    if found is None or found.dead or found.start_time < since:
        return False
    with contextlib.suppress(OSError):  # the process has ended
        executable = _executable(process.pid)
        known = _is_as_saved(executable, process.executable) or (
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
    give_up = time.monotonic() + ENDING_TIMEOUT
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


def _is_as_saved(executable: Path, saved: str) -> bool:
    """Return whether a restored process runs the file that it had. CRIU brings back a deleted file
    under another name if a new file has its name (``open_path`` in CRIU's files-reg.c).
    """
    name = saved.removesuffix(_DELETED)
    return str(executable) in (saved, f"{name}{_FAKE_LINK}{_DELETED}")


def _is_named_criu(executable: Path) -> bool:
    """Return whether the file is named CRIU, also if replaced (``criu (deleted)``)."""
    return "criu" in executable.name
