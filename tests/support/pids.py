"""Create processes with chosen pids, as CRIU does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.harness import wait_until
from tests.support.sibling import PROGRAM


def occupy(number: int) -> int:
    """Start an idle child process with the pid ``number``.

    Raises:
        CalledProcessError: The number is taken, or the kernel refuses.
    """
    maker = Path(__file__).with_name("sibling.py")
    subprocess.run([sys.executable, "-S", maker, str(number)], check=True)
    executable = Path(f"/proc/{number}/exe")  # a Python until it has called exec
    wait_until(lambda: executable.samefile(PROGRAM), f"process {number} to become {PROGRAM}")
    return number


def release(pid: int) -> None:
    """End a child made by :func:`occupy`, which frees its pid."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
