"""Commands that phosd starts and waits for."""

import os
import signal
import time

from phosd.engine.criu.launch import Child
from tests.support.harness import wait_until


def test_a_command_has_ended_although_a_child_of_it_holds_its_error_output() -> None:
    """As one that waits for a file system whose server is lost."""
    command = Child(["/bin/sh", "-c", "echo 'no such file' >&2; sleep 600 & exit 3"], ())
    try:
        began = time.monotonic()
        wait_until(lambda: command.poll() is not None, "the command to end")
        assert time.monotonic() - began < 60
        assert (command.returncode, command.said) == (3, "no such file\n")
    finally:
        os.killpg(command.pid, signal.SIGKILL)
        command.close()
