"""A container's root sends what phosd may not close: only that container is distrusted."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from phosd.engine.hook_client import distrust
from phosd.engine.hook_client.distrust import Distrusted
from phosd.engine.hook_client.link import HookLink
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Internal
from tests.support import harness, older_kernel
from tests.support.fake_hook import Answer, fake_hook, hello

MEMORY = (
    "mount -t tmpfs run /run && mkdir -p /run/phos/hook && mount -t tmpfs hook /run/phos/hook"
    ' && exec "$0" "$@"'
)
CONTAINER = ("unshare", "--mount", "sh", "-ec", MEMORY)
HOOK = """
import socket, sys
from pathlib import Path
from tests.support.fake_hook import Answer, fake_hook, hello
lies = sys.argv[1] == "lies"
def answer(_):
    return Answer(hello(), [socket.socket(socket.AF_UNIX).detach()] if lies else [])
with fake_hook(Path("/run/phos"), answer):
    print("listens", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def all_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a kernel before Linux 6.16, which passes what nobody has asked for. On others a hook can
    # send it in answers that have descriptors.
    older_kernel.passes_descriptors(monkeypatch)
    monkeypatch.setattr(distrust, "_processes", set())
    monkeypatch.setattr(distrust, "_containers", {})


@contextmanager
def hook(manner: str, *inside: str) -> Iterator[int]:
    """A root process in a container, with a hook of this manner."""
    words = [*inside, sys.executable, "-c", HOOK, manner]
    with harness.running(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "listens\n"
        yield process.pid
        process.stdin.close()
        process.wait()


def beside(pid: int) -> tuple[str, ...]:
    """How to start something in the container that a process is in."""
    return ("nsenter", f"--mount=/proc/{pid}/ns/mnt", f"--wd={Path.cwd()}")


def ask(pid: int, runtime: Path) -> None:
    with HookLink(pid, runtime) as link:
        link.hello()


def test_a_containers_root_locks_nobody_else_out(tmp_path: Path) -> None:
    runtime = tmp_path / "run"

    def refused(pid: int) -> None:
        with pytest.raises(Distrusted, match=f"in the container of process {pid} has sent"):
            ask(pid, runtime)

    with (
        ExitStack() as first_ends,
        hook("honest", *CONTAINER) as other,
        fake_hook(runtime, lambda _: Answer(hello())),
    ):
        first = first_ends.enter_context(hook("honest", *CONTAINER))
        ask(first, runtime)
        with hook("lies", *beside(first)) as liar:
            with pytest.raises(Internal, match="files or sockets instead of memory"):
                ask(liar, runtime)
            with pytest.raises(Distrusted, match=f"the hook of process {liar} has sent"):
                ask(liar, runtime)
        refused(first)  # although the liar has ended
        with hook("honest", *beside(first)) as later:
            refused(later)
            first_ends.close()
            with hook("honest", *beside(later)) as last:
                refused(last)
        # Root's programs on the machine, and in other containers.
        ask(os.getpid(), runtime)
        ask(other, runtime)


def test_it_ends_with_the_last_process_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of its mount namespace may be another container's at once."""
    with hook("honest", *CONTAINER) as pid:
        ended = ProcessId(pid, 1)  # had the same pid
        distrust._processes.add(ended)
        distrust._containers[procfs.namespace(pid, "mnt")] = {ended, ProcessId(1 << 22, 1)}
        ask(pid, tmp_path)
        assert not distrust._containers
        with hook("honest", *CONTAINER) as elsewhere:  # lives, and is in no such container
            living = procfs.process_id(elsewhere)
            assert living is not None
            distrust._containers[procfs.namespace(pid, "mnt")] = {living}
            ask(pid, tmp_path)
        monkeypatch.setattr(distrust, "_most", 0)  # so many may be left of those that have ended
        with hook("lies", *CONTAINER) as liar, pytest.raises(Internal):
            ask(liar, tmp_path)
        assert ended not in distrust._processes
