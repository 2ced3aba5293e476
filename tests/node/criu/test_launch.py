"""Commands that phosd starts and waits for."""

import os
import signal
import time
from pathlib import Path

import pytest

from phosd.engine.criu.run import program
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.launch import Child
from phosd.engine.criu.run.running import Running
from phosd.errors import Internal
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


def test_a_log_that_its_owner_replaced_is_not_read(tmp_path: Path) -> None:
    """The folder is theirs, and root would follow a link of theirs."""
    path, secret = tmp_path / "restore.log", tmp_path / "secret"
    secret.write_text("Error: the secret\n")
    log = program._new_log(path, Owner(os.getuid(), os.getgid(), ()))
    path.write_text(f"{'x' * 100_000}\n(00.1) Error (file.c:1): the reason\n")
    path.unlink()
    path.symlink_to(secret)
    command = Child(["/bin/sh", "-c", "exit 1"], ())
    with (
        pytest.raises(Internal, match=r"^the reason \(criu restore failed\);"),
        Running(command, "restore", log) as running,
    ):
        running.wait(60)
    assert log.closed
