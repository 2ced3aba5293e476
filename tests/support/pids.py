"""Processes with pids that a test chooses, as CRIU makes them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.harness import wait_until
from tests.support.sibling import PROGRAM


def occupy(number: int) -> int:
    """A child process whose pid is ``number``, doing nothing.

    Raises:
        CalledProcessError: The number is taken, or the kernel refuses.
    """
    maker = Path(__file__).with_name("sibling.py")
    subprocess.run([sys.executable, "-S", maker, str(number)], check=True)
    executable = Path(f"/proc/{number}/exe")  # until then it is a Python
    wait_until(lambda: executable.samefile(PROGRAM), f"process {number} to become {PROGRAM}")
    return number


def release(pid: int) -> None:
    """End a child made by :func:`occupy`; its number is free again."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
