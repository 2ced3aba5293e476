"""A process that asks phosd to start a program gets no more by that than it has."""

import resource
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.criu.run.program import Criu
from phosd.engine.operations.starter import Starter
from phosd.engine.system import rlimit
from phosd.errors import Busy, NotAuthorized, PhosError

ASKING = """
import ctypes, os, socket, sys, threading
libc = ctypes.CDLL(None)
listening = socket.socket(socket.AF_UNIX)
listening.bind(chr(0) + sys.argv[1])
listening.listen()
{does}
print(flush=True)
input()
"""
IN_A_THREAD = """
restricted = threading.Event()
def restrict():
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    restricted.set()
    threading.Event().wait()
threading.Thread(target=restrict, daemon=True).start()
restricted.wait()
"""
NO_CAPABILITIES = """
import struct
header = struct.pack("Ii", 0x20080522, 0)
assert libc.capset(header, bytes(24)) == 0
"""
TWO_USERS = "os.setresuid(0, 54321, 0)"


@contextmanager
def asking(name: str, does: str = "") -> Iterator[int]:
    """A root process that listens on the abstract socket of this name."""
    words = [sys.executable, "-S", "-c", ASKING.format(does=does), name]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def name() -> str:
    return f"phos-test-{secrets.token_hex(8)}"


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("os.mkdir('jail'); os.chroot('jail')", "has another root directory"),
        (IN_A_THREAD, "has threads with different rights"),
        (NO_CAPABILITIES, "has given up capabilities"),
        (TWO_USERS, "has ids other than those of user 0"),
    ],
)
def test_a_sandbox_is_not_left(
    name: str, does: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    criu = Criu.find()
    with asking(name) as pid:
        Starter.look(pid).require_plain(0, criu)
    with asking(name, does) as pid, pytest.raises(PhosError, match=why):
        Starter.look(pid).require_plain(0, criu)


def test_a_pid_that_another_process_has_by_now_is_not_the_one_that_asks(name: str) -> None:
    with asking(f"{name}-other") as pid, socket.socket(socket.AF_UNIX) as ours:
        ours.bind(f"\0{name}")
        ours.listen()
        with pytest.raises(NotAuthorized, match="does not listen"):
            Starter.look(pid).require_asking(name)


def test_what_changes_while_it_is_looked_at_does_not_count(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had executed sudo, which lifts its own limits, and comes back."""
    read, lifted = rlimit.limits, iter(range(1000))

    def limits(pid: int) -> Any:
        _, hard = resource.prlimit(pid, resource.RLIMIT_CORE)
        resource.prlimit(pid, resource.RLIMIT_CORE, (next(lifted), hard))
        return read(pid)

    with asking(name) as pid:
        monkeypatch.setattr(rlimit, "limits", limits)
        with pytest.raises(Busy, match="changes its rights or limits"):
            Starter.look(pid).require_asking(name)
        monkeypatch.undo()
        Starter.look(pid).require_asking(name)
