"""Become a command that can do little: a script of its own, which imports nothing of phosd.

    cage.py PROCESSOR_SECONDS MEMORY_BYTES OUTPUT_BYTES COMMAND...

The command has limits on what it uses, ends with its parent, and has no network where this is run
by root.
"""

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_PR_SET_NO_NEW_PRIVS = 38


def main() -> None:
    parent = os.getppid()
    seconds, memory, output = map(int, sys.argv[1:4])
    libc = ctypes.CDLL(None, use_errno=True)
    for limit, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, output),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(limit, (value, value))
    if os.geteuid() == 0 and libc.unshare(_NEW_NETWORK) != 0:
        _fail("leave the network")
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        _fail("forbid new rights")
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        _fail("be tied to the parent")
    if os.getppid() != parent:
        sys.exit("the parent has ended")
    os.nice(19)
    os.execv(sys.argv[4], sys.argv[4:])


def _fail(what: str) -> None:
    sys.exit(f"cannot {what}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main()
