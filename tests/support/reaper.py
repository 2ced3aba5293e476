"""Run a command, and reap all orphans it leaves, as an init does.

``python tests/support/reaper.py COMMAND...`` exits with the command's status, or with 128 plus the
number of the signal that ended it.

A restored program has no parent. When it is killed, its pid stays taken until init has reaped it.
The inits of some containers take seconds for that, and each test that kills such a program would
wait as long.
"""

import ctypes
import os
import signal
import sys
from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> int:
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "cannot become the init of what is started here")
    # Block signals until the command's pid is known.
    ours = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
    child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, setsigmask=before)

    def pass_on(number: int, _: FrameType | None) -> None:
        os.kill(child, number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the command, too
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    while True:
        pid, status = os.wait()
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
