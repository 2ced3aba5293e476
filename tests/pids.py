"""Processes with pids that a test chooses, as CRIU makes them.

The kernel is asked for the very number. Moving its counter (``ns_last_pid``) instead would give
numbers that were freed a moment ago to whoever starts a process next, and take them away from the
restores of tests that run beside this one.
"""

import ctypes
import os
import signal
import time
from pathlib import Path

_PROGRAM = "/bin/sleep"
_CLONE3 = 435  # the number of the system call, on every architecture

# The interpreter's lock stays held, so that no other thread can have it when the child is made.
_libc = ctypes.PyDLL(None, use_errno=True)


class _CloneArgs(ctypes.Structure):
    """``struct clone_args`` of ``linux/sched.h``."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size"),
            *("tls", "set_tid", "set_tid_size", "cgroup"),
        )
    )


def occupy(number: int) -> int:
    """A child process whose pid is ``number``, doing nothing.

    The kernel frees a thread's number a moment after its process has been waited for.

    Raises:
        OSError: The number is taken, or the kernel refuses.
    """
    deadline = time.monotonic() + 5
    while True:
        try:
            child = _clone(number)
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)
    while not Path(f"/proc/{child}/exe").samefile(_PROGRAM):  # until then it is one like us
        time.sleep(0.001)
    return child


def _clone(number: int) -> int:
    wanted = ctypes.c_int(number)
    arguments = _CloneArgs(
        exit_signal=signal.SIGCHLD, set_tid=ctypes.addressof(wanted), set_tid_size=1
    )
    child: int = _libc.syscall(_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments))
    if child == 0:
        os.execv(_PROGRAM, [_PROGRAM, "600"])
    if child < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: pid {number}")
    assert child == number
    return child


def release(pid: int) -> None:
    """End a child made by :func:`occupy`; its number is free again."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
