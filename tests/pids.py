"""Processes with pids that a test chooses, as CRIU makes them.

The kernel is asked for the very number. Moving its counter (``ns_last_pid``) instead would give
numbers that were freed a moment ago to whoever starts a process next, and take them away from the
restores of tests that run beside this one.

Run as a program, with a number, this makes such a process a child of whoever ran it: a process with
several threads, as tests are, cannot safely make one and go on in it.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_PROGRAM = "/bin/sleep"
_CLONE3 = 435  # the number of the system call, on every architecture
_CLONE_PARENT = 0x8000
_PATIENCE = 60.0

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

    Raises:
        CalledProcessError: The number is taken, or the kernel refuses.
    """
    subprocess.run([sys.executable, "-S", __file__, str(number)], check=True)
    deadline = time.monotonic() + _PATIENCE
    while not Path(f"/proc/{number}/exe").samefile(_PROGRAM):  # until then it is a Python
        assert time.monotonic() < deadline, f"process {number} has not become {_PROGRAM}"
        time.sleep(0.001)
    return number


def release(pid: int) -> None:
    """End a child made by :func:`occupy`; its number is free again."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _make_sibling(number: int) -> None:
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
    arguments = _CloneArgs(
        flags=_CLONE_PARENT, set_tid=ctypes.addressof(wanted), set_tid_size=1
    )  # its end is told to the parent as ours will be
    child: int = _libc.syscall(_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments))
    if child == 0:
        try:
            os.execv(_PROGRAM, [_PROGRAM, "600"])
        finally:
            os._exit(127)
    if child < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)}: pid {number}")


if __name__ == "__main__":
    _make_sibling(int(sys.argv[1]))
