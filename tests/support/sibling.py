"""Create a process with a given pid, as a child of the caller, and exit.

This is a program of its own with one thread: in a process with several threads, as tests have, the
child of a bare ``clone3`` could not safely run Python.

The kernel is asked for exactly this pid. Setting its counter (``ns_last_pid``) instead would hand
pids freed a moment ago to any process started next, and take them from the restores of tests that
run in parallel.
"""

import ctypes
import os
import sys
import time

PROGRAM = "/bin/sleep"
"""The program that the process executes."""
_CLONE3 = 435  # number of the system call on every architecture
_CLONE_PARENT = 0x8000

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


def make_sibling(number: int) -> None:
    """Create the process, retrying: a thread's number is freed only a moment after its process was
    reaped.
    """
    deadline = time.monotonic() + 5
    while True:
        try:
            return _clone(number)
        except FileExistsError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.001)


def _clone(number: int) -> None:
    wanted = ctypes.c_int(number)
    # CLONE_PARENT makes the caller its parent, which is told of its end.
    arguments = _CloneArgs(flags=_CLONE_PARENT, set_tid=ctypes.addressof(wanted), set_tid_size=1)
    child: int = _libc.syscall(_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments))
    if child == 0:
        try:
            os.execv(PROGRAM, [PROGRAM, "600"])
        finally:
            os._exit(127)
    if child < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: pid {number}")


if __name__ == "__main__":
    make_sibling(int(sys.argv[1]))
