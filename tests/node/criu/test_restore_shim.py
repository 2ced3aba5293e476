"""A keeper that is killed takes with it whatever it was about to run."""

import os
import subprocess
import time
from pathlib import Path

from phosd.engine.criu.restore import restore_shim
from phosd.engine.system import privileges
from tests.support.harness import wait_until

HERE = Path(restore_shim.__file__).parents[4]


def test_killed_at_any_moment_it_leaves_nobody(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    script = f"echo >> {ran}; exec sleep 60"
    words = privileges.command(
        ["/bin/sh", "-c", script], uid=0, gid=0, groups=(), dies_with_parent=True
    )
    command = restore_shim.command(
        words, user=(0, 0, ()), inputs=(), output=None, terminal=None, parent=True, root=1, end=None
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    began = time.monotonic()
    with subprocess.Popen(command, env=environment) as process:
        wait_until(ran.exists, "the command to run")
        step = (time.monotonic() - began) / 40
        process.kill()
    ran.unlink()
    for moment in range(80):  # until the command runs, which takes about half of them
        reader, writer = os.pipe()
        with subprocess.Popen(command, env=environment, pass_fds=(writer,)) as process:
            os.close(writer)
            time.sleep(step * moment)
            process.kill()
        os.set_blocking(reader, False)
        wait_until(lambda: ended(reader), "the last of them to end", 20.0)  # noqa: B023
        os.close(reader)
    assert ran.exists(), "it was always too early"


def ended(reader: int) -> bool:
    """Whether nobody has the other end of the pipe any more."""
    try:
        return os.read(reader, 1) == b""
    except BlockingIOError:
        return False
