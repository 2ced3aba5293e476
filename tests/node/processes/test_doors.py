"""Which sockets a program is called by, seen from outside."""

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.program import doors
from phosd.engine.program.doors import open_doors, places
from phosd.errors import Unsupported
from tests.support.harness import wait_until

_SERVER = """
import os, socket, sys, time
kept = [socket.create_server(("127.0.0.1", 0))]
kept.append(socket.create_server(("::1", 0), family=socket.AF_INET6))
kept.append(socket.socket(socket.AF_UNIX)); kept[-1].bind(sys.argv[1]); kept[-1].listen()
kept.append(socket.socket(socket.AF_UNIX)); kept[-1].bind("\\0" + sys.argv[1]); kept[-1].listen()
kept.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)); kept[-1].bind(("127.0.0.1", 0))
kept += socket.socketpair()
own = socket.create_connection(kept[0].getsockname())  # of its own: nobody else calls there
kept += [own, kept[0].accept()[0]]
own.sendall(b"within")
print(kept[0].getsockname()[1], kept[1].getsockname()[1], flush=True)
kept.append(kept[0].accept()[0])
print("accepted", flush=True)
time.sleep(600)
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, int, int, str]]:
    """A process that listens and has accepted one connection, which the test has: its pid, its two
    ports, and its unix socket.
    """
    name = f"/tmp/phos-doors-{secrets.token_hex(8)}"
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, name], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        first, second = map(int, process.stdout.readline().split())
        yield process.pid, first, second, name
    finally:
        process.kill()
        process.wait()
        Path(name).unlink()


@contextlib.contextmanager
def connected(server: tuple[int, int, int, str]) -> Iterator[socket.socket]:
    """The connection that it accepts."""
    with socket.create_connection(("127.0.0.1", server[1])) as caller:
        yield caller


def has_accepted(pid: int) -> bool:
    with contextlib.closing(open_doors([pid])) as found:
        return any(found.accepted.values())


def open_here() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def is_called(found: doors.Doors) -> bool:
    return bool(select.select(found.listening, [], [], 0)[0])


def test_where_it_listens(server: tuple[int, int, int, str]) -> None:
    pid, first, second, name = server
    wanted = {f"127.0.0.1:{first}", f"[::1]:{second}", name, f"@{name}"}
    assert {*places([pid])} == wanted
    assert places([pid, pid]) == sorted(wanted)
    with contextlib.closing(open_doors([pid])) as found:
        assert len(found.listening) == 4 and not is_called(found)


def test_a_call_is_seen_and_stays_there(server: tuple[int, int, int, str]) -> None:
    pid, _, second, name = server
    os.kill(pid, signal.SIGSTOP)
    calls = (
        (socket.AF_INET6, ("::1", second)),
        (socket.AF_UNIX, name),
        (socket.AF_UNIX, f"\0{name}"),
    )
    for family, place in calls:
        with contextlib.closing(open_doors([pid])) as found, socket.socket(family) as caller:
            before = len(select.select(found.listening, [], [], 0)[0])
            caller.connect(place)
            wait_until(
                lambda: len(select.select(found.listening, [], [], 0)[0]) == before + 1,  # noqa: B023
                "a call",
            )


def test_what_is_sent_on_a_connection(server: tuple[int, int, int, str]) -> None:
    """What the program sends to itself is no call, and neither is the end of a connection."""
    pid = server[0]
    with connected(server) as caller:
        wait_until(lambda: has_accepted(pid), "the server to accept")
        with contextlib.closing(open_doors([pid])) as found:
            assert {pid: 1} == {each: len(inodes) for each, inodes in found.accepted.items()}
            assert not found.is_sent_to and not found.is_answering
            caller.sendall(b"call")
            wait_until(lambda: found.is_sent_to, "what was sent")
            assert found.is_answering and doors.is_answering([pid])


def test_the_end_of_a_connection_is_no_call(server: tuple[int, int, int, str]) -> None:
    pid = server[0]
    with connected(server):
        wait_until(lambda: has_accepted(pid), "the server to accept")
        found = open_doors([pid])
    with contextlib.closing(found):
        for _ in range(20):
            assert not found.is_sent_to and not is_called(found)


def test_who_has_ended_has_no_doors(server: tuple[int, int, int, str]) -> None:
    found = open_doors([server[0]])
    os.kill(server[0], signal.SIGKILL)
    os.waitpid(server[0], 0)
    assert not found.is_sent_to
    found.close()
    assert places([server[0]]) == [] and open_doors([server[0]]).listening == ()


def test_too_many(server: tuple[int, int, int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "MOST", 3)
    before = open_here()
    with pytest.raises(Unsupported, match="listens on more than 3 sockets"):
        open_doors([server[0]])
    wait_until(lambda: open_here() <= before, "what was opened to be closed")


@contextlib.contextmanager
def running(script: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a script, and has printed its first line."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script, *words], text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            process.stdout.readline()
            yield process
        finally:
            process.kill()


_NAMES = """
import socket, sys, time
kept = [socket.socket(), socket.create_server(("127.0.0.1", 0))]
kept[0].connect(kept[1].getsockname())
inode = __import__("os").fstat(kept[0].fileno()).st_ino
row = "0" * 16 + ": 00000002 00000000 00010000 0001 01 %d /tmp/forged" % inode
for name in ("\\0a\\nx", "\\0b\\n\\n", "\\0c\\xff\\n: 1", "\\0d\\n" + row):
    kept.append(socket.socket(socket.AF_UNIX)); kept[-1].bind(name); kept[-1].listen()
print(flush=True)
time.sleep(600)
"""


def test_names_that_look_like_rows() -> None:
    """What the kernel's table says of unix sockets, its users have written."""
    with running(_NAMES) as process, contextlib.closing(open_doors([process.pid])) as found:
        assert len(found.listening) == 5
        for each in found.listening:
            assert each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


_LINGERS = """
import socket, struct, sys
door = socket.create_server(("127.0.0.1", 0))
print(flush=True)
port = int(sys.stdin.readline())
door.shutdown(socket.SHUT_RDWR)
door.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
door.connect(("127.0.0.1", port))
door.setblocking(False)
try:
    while True: door.send(b"x" * (1 << 16))
except BlockingIOError:
    print(flush=True)
"""


def test_to_close_a_door_takes_no_time() -> None:
    """Its program has made a connection of it, whose last end takes a minute to close."""
    with socket.create_server(("127.0.0.1", 0)) as peer, running(_LINGERS) as process:
        assert process.stdin is not None and process.stdout is not None
        found = open_doors([process.pid])
        process.stdin.write(f"{peer.getsockname()[1]}\n")
        process.stdin.flush()
        process.stdout.readline()
        process.kill()
        process.wait()
        began = time.monotonic()
        found.close()
        assert time.monotonic() - began < 1
