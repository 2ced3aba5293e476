"""Nobody waits for a file that somebody else has sent: not phosd, not its workers, not ``phos``.

A socket whose last close takes years is sent to each socket that they listen at or connect to, on
this kernel, and as on one that passes descriptors whatever is said (before Linux 6.16).
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phosd import unix_sockets
from phosd.cli.run_command import enclosed
from phosd.client.transfer import Transfer
from phosd.engine.criu.files import file_worker
from phosd.engine.criu.restore.ending import Ending
from phosd.engine.criu.restore.inherited_stdio import RestoredStdio
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.tracers import Tracer, Turn
from phosd.engine.hook_client import distrust
from phosd.engine.hook_client.link import HookLink
from phosd.engine.hook_client.places import socket_path
from phosd.engine.image.cpu_manifest import CpuDetails, Endpoint, EndpointKind
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.operations.transfer.caller_stream import CallerStream
from phosd.engine.program import keeper
from phosd.errors import PhosError
from phosd.service.config import Config
from phosd.service.tasks.own_checkpoints import OPEN
from tests.support import older_kernel
from tests.support.fake_engine import FakeEngine
from tests.support.harness import start, wait_until
from tests.support.lingering import lingering_in
from tests.support.service import Service, serving
from tests.unit.test_unix_sockets import TAKES_DESCRIPTORS, makers

PATIENCE = 120
NAME = f"phos-test-{os.getpid()}"
STRANGER = 65534


@pytest.fixture(params=["this kernel", "an older kernel"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    before = children()
    if request.param == "an older kernel":
        older_kernel.passes_descriptors(monkeypatch)
        older_kernel.tells_no_peer(monkeypatch)
    yield request.param
    wait_until(lambda: children() <= before, "the end of those who close", PATIENCE)


def children() -> set[int]:
    """The processes that close what nobody waits for; those that have ended are among them until
    the next one, or for ever.
    """
    found = subprocess.run(
        ["pgrep", "-r", "R,S,D", "-P", str(os.getpid()), "-x", "cat"],
        capture_output=True,
        text=True,
    )
    return {int(pid) for pid in found.stdout.split()}


def ends(work: Callable[[], object], what: str) -> None:
    """Do what is under attack; it may fail, but not wait."""

    def attacked() -> None:
        with contextlib.suppress(PhosError, OSError, EOFError):
            work()

    thread = threading.Thread(target=attacked, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), f"{what} waits for somebody else's peer"


def connected(address: "str | Path") -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(address) if isinstance(address, Path) else f"\0{address}")
    return connection


@contextlib.contextmanager
def listening(address: "str | Path") -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address) if isinstance(address, Path) else f"\0{address}")
        listener.listen()
        yield listener


@contextlib.contextmanager
def lying(listener: socket.socket) -> Iterator[threading.Event]:
    """Send a socket that lingers to the first who connects, until the end of the block. The event
    says that it is in no other place: a close before that would be none that waits.
    """
    over, sent = threading.Event(), threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, lingering_in(connection):
            sent.set()
            over.wait(PATIENCE)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield sent
    over.set()
    thread.join(PATIENCE)


def strangers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first who connects be another user."""
    found = iter([(1, STRANGER)])
    real = unix_sockets.peer_of
    monkeypatch.setattr(unix_sockets, "peer_of", lambda peer: next(found, None) or real(peer))


# -- each of the sockets ---------------------------------------------------------------------------


def a_callers_stream(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    def import_() -> None:
        with CallerStream(NAME, os.geteuid(), Cancellation(), within=2) as stream:
            assert sent.wait(PATIENCE)
            stream.receive(4096)

    with listening(NAME) as listener, lying(listener) as sent:
        ends(import_, "an import")


def a_transfer(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    strangers_first(monkeypatch)
    transfer = Transfer(lambda link: link.read(1))
    with (
        connected(transfer.name) as first,
        lingering_in(first),
        transfer,
        connected(transfer.name) as second,
    ):
        second.send(b"y")
        ends(transfer.result, "phos export")
    assert transfer.result() == b"y"


def a_transfer_with_ourselves(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    with (
        Transfer(lambda link: link.wait_for_end()) as transfer,
        connected(transfer.name) as first,
        lingering_in(first),
    ):
        first.shutdown(socket.SHUT_WR)
        ends(transfer.result, "phos export")


def a_start(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    strangers_first(monkeypatch)
    listener = unix_sockets.listening(NAME)
    with connected(NAME) as first, lingering_in(first), connected(NAME):
        found: list[socket.socket] = []
        ends(lambda: found.append(enclosed._connection_of(os.getpid(), listener)), "phos run")
        with connected(NAME) as left, lingering_in(left):
            ends(lambda: unix_sockets.stop_listening(listener), "phos run")
    (connection,) = found
    connection.close()


def a_keeper(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(keeper, "_TIMEOUT", 1.0)
    with listening(NAME) as listener, lying(listener):
        ends(lambda: keeper._start(NAME), "a keeper")


def a_hook(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    monkeypatch.setattr(distrust, "_processes", set())
    path = socket_path(place, os.getpid())
    path.parent.mkdir(parents=True)

    def ask() -> None:
        with HookLink(os.getpid(), place, 1.0) as link:
            link.hello()

    with listening(path) as listener, lying(listener):
        ends(ask, "a request to a hook")
    path.unlink()


def a_file_worker(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    theirs: list[socket.socket] = []

    def start(*_: object, stdin: int, **__: object) -> "subprocess.Popen[bytes]":
        theirs.append(socket.socket(fileno=os.dup(stdin)))
        return subprocess.Popen(["sleep", "infinity"], stderr=subprocess.PIPE)

    started = SimpleNamespace(Popen=start, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(file_worker, "subprocess", started)
    worker = file_worker.Worker(0)
    with theirs[0], lingering_in(theirs[0]):
        ends(lambda: worker.answer(1.0), "a restore")
        ends(lambda: worker.__exit__(), "a restore")


def a_programs_output(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    details = CpuDetails(
        *(0, 0, (), "", "", False, 0), endpoints=(Endpoint(EndpointKind.SOCKET, "key", 1, 1),)
    )
    stdio = RestoredStdio(1, details, Owner(0, 0, ()), None, Ending()).__enter__()
    with socket.socket(fileno=os.dup(stdio._program[0])) as program, lingering_in(program):
        ends(stdio._close, "a restore whose shim was killed")


def a_tracer(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    tracer = Tracer(lambda: (), 1.0)
    with lingering_in(tracer._theirs):
        ends(lambda: tracer.heard(Turn.CHECKPOINT), "a checkpoint")
        ends(tracer.close, "a checkpoint")


def the_plugin_of_a_runtime(service: Service) -> None:
    """Root's own, which takes a folder."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(service.config.runtime_dir / "runtime.sock"))
        with lingering_in(connection, b"await") as taken:
            assert taken
            assert connection.recv(4096).startswith(b"error ")
            other = connected_as(service, socket.SOCK_SEQPACKET, "runtime.sock")
            with other, lingering_in(other, b""):
                serves(service)


def programs(service: Service) -> None:
    """As a request, and as the one connection too many. All of it has come before phosd looks."""
    begin = threading.Event()
    for silent in (0, OPEN):
        begin.clear()
        service.loop.call_soon_threadsafe(begin.wait, PATIENCE)
        with contextlib.ExitStack() as stack:
            for _ in range(silent):
                stack.enter_context(connected_as(service))
            connection = stack.enter_context(connected_as(service))
            stack.enter_context(lingering_in(connection))
            begin.set()
            serves(service)


def connected_as(
    service: Service, kind: int = socket.SOCK_STREAM, name: str = "program.sock"
) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, kind)
    connection.connect(str(service.config.runtime_dir / name))
    return connection


def serves(service: Service) -> None:
    """It answers others, at once and when what has come is too late."""
    assert service.call("ListProcesses").startswith("a")
    assert service.call("ListProcesses").startswith("a")


ATTACKS = {
    "cli/run_command/enclosed.py": [a_start],
    "client/transfer.py": [a_transfer, a_transfer_with_ourselves],
    "engine/criu/files/file_worker.py": [a_file_worker],
    "engine/criu/restore/inherited_stdio.py": [a_programs_output],
    "engine/criu/run/tracers.py": [a_tracer],
    "engine/hook_client/connection.py": [a_hook],
    "engine/operations/transfer/caller_stream.py": [a_callers_stream],
    "engine/program/keeper.py": [a_keeper],
}
SERVED = {
    "service/tasks/own_checkpoints.py": programs,
    "service/tasks/runtime_checkpoints.py": the_plugin_of_a_runtime,
}
OF_ROOT = {*TAKES_DESCRIPTORS} - {*SERVED}
"""What no other user reaches."""
OF_ITS_USER = {"client/over_ssh.py"}
"""What is in a folder that nobody else may enter."""


def test_every_socket_is_attacked() -> None:
    assert {*makers()} == {*ATTACKS} | {*SERVED} | OF_ROOT | OF_ITS_USER


@pytest.mark.parametrize(
    "attack", [each for attacks in ATTACKS.values() for each in attacks], ids=lambda f: f.__name__
)
def test_nobody_is_kept_waiting(
    attack: Callable[[pytest.MonkeyPatch, Path], None],
    kernel: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    attack(monkeypatch, tmp_path)


@pytest.mark.parametrize("attack", SERVED.values(), ids=lambda f: f.__name__)
def test_phosd_serves_the_others(
    attack: Callable[[Service], None], kernel: str, bus: str, tmp_path: Path
) -> None:
    """And ends, with what is still in the queue of a socket."""
    config = Config(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run", rescan_seconds=0.5)
    config.runtime_dir.mkdir()
    with contextlib.ExitStack() as stack, serving(bus, config, FakeEngine()) as service:
        attack(service)
        for _ in range(3):
            left = stack.enter_context(connected_as(service))
            stack.enter_context(lingering_in(left))


def test_who_sends_descriptors_is_told(tmp_path: Path) -> None:
    """By a kernel that can tell; another one passes them, and the tests above are about these."""
    with (
        unix_sockets.listening(tmp_path / "socket") as listener,
        connected(tmp_path / "socket") as mine,
        listener.accept()[0] as connection,
    ):
        try:
            mine.getsockopt(socket.SOL_SOCKET, unix_sockets.PASS_RIGHTS)
        except OSError:
            assert unix_sockets.takes_descriptors(connection)
        else:
            with pytest.raises(PermissionError):
                socket.send_fds(mine, [b"x"], [0])


_STRANGER = """
import os, socket, struct, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    mine = socket.socket()
    mine.connect(server.getsockname())
    peer, _ = server.accept()
mine.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1 << 30))
mine.setblocking(False)
try:
    while True:
        mine.send(bytes(1 << 16))
except BlockingIOError:
    pass
os.setresuid(65534, 65534, 65534)
for name in sys.argv[1:]:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect("\\0" + name)
    try:
        socket.send_fds(connection, [b"x"], [mine.fileno()])
        passed = True
    except OSError:
        passed = False
if passed:  # else this is the last one
    os.close(mine.detach())
print("sent", flush=True)
sys.stdin.read()
os._exit(0)  # the kernel does not wait then
"""


def test_a_hook_turns_strangers_away(tmp_path: Path) -> None:
    """Its abstract name tells strangers where it listens for legacy CUDA IPC."""
    target = start("single", tmp_path, runtime=tmp_path / "run")
    try:
        target.wait_for_steps(1)
        table = Path("/proc/net/unix").read_text()
        names = re.findall(f"@(phos-ipc-{target.pid}-.*)", table)
        assert names
        # It is stopped while they send: it finds all in its queue.
        os.kill(target.pid, signal.SIGSTOP)
        words = [sys.executable, "-c", _STRANGER, *names, *names]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
            assert stranger.stdout is not None and stranger.stdout.readline() == b"sent\n"
            os.kill(target.pid, signal.SIGCONT)
            with HookLink(target.pid, tmp_path / "run", PATIENCE) as link:
                for _ in range(20):
                    assert link.hello().pid == target.pid
                    time.sleep(0.01)
    finally:
        target.kill()


def test_messages_without_descriptors_are_only_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an older kernel; also empty ones, before which and behind which something lies."""
    older_kernel.passes_descriptors(monkeypatch)
    abandoned: list[int] = []
    monkeypatch.setattr(unix_sockets, "abandon", abandoned.append)
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        for messages, closed in (
            ([], True),
            ([b"x"], True),
            ([b"", b"yy", b""], True),
            ([b"", b"", None], False),
            ([b"x", None, b""], False),
        ):
            ours, theirs = unix_sockets.pair(kind)
            with theirs, Path(os.devnull).open("rb") as sent:
                for message in messages:
                    if message is None:
                        socket.send_fds(theirs, [b"z"], [sent.fileno()])
                    else:
                        theirs.send(message)
                unix_sockets.close(ours)
                assert (abandoned == []) is closed, (kind, messages)
                while abandoned:
                    os.close(abandoned.pop())


def test_bytes_before_descriptors_are_received(monkeypatch: pytest.MonkeyPatch) -> None:
    older_kernel.passes_descriptors(monkeypatch)
    ours, theirs = unix_sockets.pair()
    with ours, theirs, Path(os.devnull).open("rb") as sent:
        theirs.send(b"abc")
        assert unix_sockets.receive(ours, 2) == b"ab"
        assert unix_sockets.receive(ours, 10) == b"c"
        socket.send_fds(theirs, [b"d"], [sent.fileno()])
        for _ in range(2):
            with pytest.raises(unix_sockets.DescriptorsSent):
                unix_sockets.receive(ours, 10)
