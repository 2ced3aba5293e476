"""Makes a process with a pid of its caller's choice, as a child of the caller, and ends.

A program of its own, with one thread: a process with several, as tests are, cannot safely make one
in this way and go on in it.

The kernel is asked for the very number. Moving its counter (``ns_last_pid``) instead would give
numbers that were freed a moment ago to whoever starts a process next, and take them away from the
restores of tests that run beside this one.
"""

import ctypes
import os
import sys
import time

PROGRAM = "/bin/sleep"
"""What the process becomes."""
_CLONE3 = 435  # the number of the system call, on every architecture
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
    """The kernel frees a thread's number a moment after its process has been waited for."""
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
    # Its end is told to the parent as ours will be.
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
