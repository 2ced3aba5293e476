"""Connecting to a hook: one that is slow, gone, asleep, or somebody else."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from phosd import unix_sockets
from phosd.engine.hook_client import distrust, places, wire
from phosd.engine.hook_client.distrust import Distrusted, Peer
from phosd.engine.hook_client.link import HookLink
from phosd.engine.hook_client.places import socket_path
from phosd.engine.hook_client.wire import HEADER, REPLY, BlockFlag, Type
from phosd.engine.system import procfs
from phosd.engine.system.procfs import ProcessId
from phosd.errors import Internal, NoSuchProcess, NotAuthorized, PhosError, Timeout, Unsupported
from tests.support.fake_hook import Answer, blocks, fake_hook, files, hello, open_files
from tests.support.hanging_folder import hanging_folder
from tests.support.lingering import lingering

HAS = int(BlockFlag.HAS_DESCRIPTOR)

# -- slow, gone, or somebody else ---------------------------------------------------------------


def test_the_deadline_is_of_the_whole_request(runtime: Path) -> None:
    """One byte now and then does not keep us for ever."""
    body = hello()
    path = socket_path(runtime, os.getpid())
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with HookLink(os.getpid(), runtime, deadline=0.5) as link:
            peer, _ = listener.accept()

            def drip() -> None:
                request = peer.recv(100)
                sequence = wire.HEADER.unpack(request)[3]
                head = (wire.MAGIC, 1, Type.HELLO | wire.REPLY, sequence, 0, len(body), 0)
                for byte in wire.HEADER.pack(*head) + body:
                    try:
                        peer.send(bytes([byte]))
                    except OSError:
                        return
                    time.sleep(0.05)

            thread = threading.Thread(target=drip)
            thread.start()
            began = time.monotonic()
            with pytest.raises(Timeout, match=r"HELLO in 0\.5 s"):
                link.hello()
            assert time.monotonic() - began < 12, "as long as something came"
            assert not link.connected
            thread.join()
            peer.close()


def test_a_lost_connection_ends_the_link(runtime: Path) -> None:
    answer = Answer(hello(), close=True)
    with fake_hook(runtime, lambda _: answer), HookLink(os.getpid(), runtime) as link:
        link.hello()
        with pytest.raises(NoSuchProcess, match="went away during PARK"):
            link.park()
        assert not link.connected
        with pytest.raises(NoSuchProcess, match=r"connection to the hook .* was lost"):
            link.park()


def test_a_hook_of_another_version_is_told_as_that(runtime: Path) -> None:
    newer = (wire.VERSION + 1).to_bytes(2, "little")
    answer = Answer(hello(), changed=lambda message: message[:4] + newer + message[6:])
    with fake_hook(runtime, lambda _: answer), HookLink(os.getpid(), runtime) as link:
        with pytest.raises(Internal, match=r"version 2 of the protocol; this phosd speaks 1; .*"):
            link.hello()
        assert not link.connected


def test_nobody_listens(runtime: Path) -> None:
    path = socket_path(runtime, os.getpid())
    path.parent.mkdir(parents=True)
    before = open_files()
    with pytest.raises(NoSuchProcess, match="no hook"):
        HookLink(os.getpid(), runtime).connect()
    with socket.socket(socket.AF_UNIX) as stale:  # what an earlier process of this pid left
        stale.bind(str(path))
    with pytest.raises(NoSuchProcess, match="does not answer"):
        HookLink(os.getpid(), runtime).connect()
    with pytest.raises(NoSuchProcess):
        HookLink(2**22 + 1, runtime).connect()
    assert open_files() == before


@pytest.mark.parametrize("what", ["file", "link", "folder"])
def test_something_else_has_the_sockets_name(runtime: Path, what: str) -> None:
    path = socket_path(runtime, os.getpid())
    path.parent.mkdir(parents=True)
    elsewhere = runtime / "elsewhere"
    elsewhere.mkdir()
    with fake_hook(elsewhere, lambda _: Answer(hello())):
        if what == "file":
            path.touch()
        elif what == "link":
            path.symlink_to(socket_path(elsewhere, os.getpid()))
        else:
            path.mkdir()
        with pytest.raises(NotAuthorized, match="not a socket of the owner"):
            HookLink(os.getpid(), runtime).connect()


def test_the_socket_of_another_user(runtime: Path) -> None:
    with fake_hook(runtime, lambda _: Answer(hello())):
        os.chown(socket_path(runtime, os.getpid()), 12345, 12345)
        with pytest.raises(NotAuthorized, match="owner"):
            HookLink(os.getpid(), runtime).connect()


def test_another_process_listens(runtime: Path) -> None:
    """A program of the same user answers in the name of a process that is not itself."""
    path = socket_path(runtime, os.getpid())
    path.parent.mkdir(parents=True)
    code = (
        "import socket, sys\n"
        "listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1]); listener.listen()\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as other:
        assert other.stdout and other.stdout.readline() == "ready\n"
        before = open_files()
        with pytest.raises(NotAuthorized, match=f"served by process {other.pid}"):
            HookLink(os.getpid(), runtime).connect()
        assert open_files() == before


def test_a_full_queue_is_no_missing_hook(runtime: Path) -> None:
    """Taking it for one would have the driver save what it then cannot bring back."""
    path = socket_path(runtime, os.getpid())
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        waiting = [HookLink(os.getpid(), runtime).connect()]
        with pytest.raises(Timeout, match="takes no connection"):
            for _ in range(8):
                waiting.append(HookLink(os.getpid(), runtime, 0.2).connect())
        for link in waiting:
            link.close()


# -- detach and wake ----------------------------------------------------------------------------


@pytest.mark.parametrize("closes", [True, False])
def test_a_detached_hook_holds_no_connection(runtime: Path, closes: bool) -> None:
    """It closes its own after its answer, which is waited for, though not for ever."""
    path = socket_path(runtime, os.getpid())
    path.parent.mkdir(parents=True)
    closed: list[float] = []

    def run(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            request = connection.recv(HEADER.size)
            magic, version, type_, sequence = HEADER.unpack(request)[:4]
            connection.sendall(HEADER.pack(magic, version, type_ | REPLY, sequence, 0, 0, 0))
            if closes:
                time.sleep(0.3)
                closed.append(time.monotonic())
            else:
                connection.recv(1)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        hook = threading.Thread(target=run, args=(listener,))
        hook.start()
        began = time.monotonic()
        HookLink(os.getpid(), runtime).connect().detach()
        took = time.monotonic() - began
        assert bool(closed) == closes and 0.3 < took < 5.0
        hook.join(10)


def sleeping_hook(runtime: Path, until_gone: Path) -> threading.Thread:
    """What a detached hook does: look for the wake file, then listen; ends at a hello."""
    path = socket_path(runtime, os.getpid())
    wake = path.with_suffix(".wake")

    def run() -> None:
        end = time.monotonic() + 10
        while not (wake.is_file() and not wake.is_symlink()) or until_gone.exists():
            assert time.monotonic() < end
            time.sleep(0.001)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            connection, _ = listener.accept()
            with connection:
                connection.recv(1)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("squatted", ["nothing", "file", "link", "full folder"])
@pytest.mark.parametrize("suffix", [".wake", ".sock"])
def test_a_hook_is_woken_whatever_stands_in_the_way(
    runtime: Path, suffix: str, squatted: str
) -> None:
    """The folder is anybody's; a process that is parked must come back all the same."""
    path = socket_path(runtime, os.getpid()).with_suffix(suffix)
    path.parent.mkdir(parents=True)
    victim = runtime / "victim"
    victim.write_text("precious")
    if squatted == "file":
        path.write_text("")
        os.chown(path, 12345, 12345)
    elif squatted == "link":
        path.symlink_to(victim)
    elif squatted == "full folder":
        path.mkdir()
        (path / "file").touch()
    wanted = path if suffix == ".sock" else runtime / "no such"
    hook = sleeping_hook(runtime, until_gone=wanted)
    link = HookLink(os.getpid(), runtime)
    link.reattach(5)
    assert link.connected
    link.close()
    hook.join(10)
    assert not hook.is_alive()
    assert not socket_path(runtime, os.getpid()).with_suffix(".wake").exists()
    assert victim.read_text() == "precious"


def test_a_hook_that_does_not_come_back(runtime: Path) -> None:
    (runtime / "hook").mkdir()
    with pytest.raises(Timeout, match="did not come back in 0 s"):
        HookLink(os.getpid(), runtime).reattach(0.05)
    assert not any(path.is_file() for path in (runtime / "hook").rglob("*"))


def test_a_process_that_ends_instead_of_coming_back(runtime: Path) -> None:
    (runtime / "hook").mkdir()
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        link = HookLink(sleeper.pid, runtime)
        threading.Timer(0.1, sleeper.kill).start()
        with pytest.raises(NoSuchProcess, match="ended before its hook came back"):
            link.reattach(20)  # it stays a zombie, since nobody waits for it yet


def test_files_of_a_lost_server_are_never_closed(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing one asks the server, which may be the hook's user, and waits for ever."""
    monkeypatch.setattr(distrust, "_processes", set())
    folder = tmp_path / "far"
    folder.mkdir()
    with hanging_folder(folder) as server:
        (folder / "file").touch()
        file = os.open(folder / "file", os.O_RDONLY)
        mine = [*files(1), file]
        answer = Answer(blocks((1, HAS), (2, HAS)), mine)
        server.hang()
        with fake_hook(runtime, lambda _: answer):
            before = open_files()
            with HookLink(os.getpid(), runtime) as link, pytest.raises(Internal, match="files"):
                list(link.export_blocks())
            assert open_files() == before
            with pytest.raises(Distrusted, match=f"process {os.getpid()} has sent files"):
                HookLink(os.getpid(), runtime).connect()
        server.answer()
        for descriptor in mine:
            os.close(descriptor)


def test_who_is_not_trusted_is_not_waited_for(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the hook's own socket put aside, as another's in its place would be."""
    monkeypatch.setattr(distrust, "_processes", {procfs.process_id(os.getpid())})
    with fake_hook(runtime, lambda _: Answer(hello())):
        before = socket_path(runtime, os.getpid()).stat().st_ctime_ns
        with pytest.raises(Distrusted):
            HookLink(os.getpid(), runtime).reattach(20)
        assert socket_path(runtime, os.getpid()).stat().st_ctime_ns == before


@pytest.mark.parametrize("when", ["answer", "after", "unread"])
def test_a_socket_that_cannot_be_closed(
    runtime: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Sent with an answer, behind it, or when nobody asks for anything any more, on a kernel that
    passes what nobody has asked for.
    """
    monkeypatch.setattr(unix_sockets, "PASS_RIGHTS", 0x7FFF)
    monkeypatch.setattr(distrust, "_processes", set())
    path = socket_path(runtime, os.getpid())
    path.parent.mkdir(parents=True)
    all_sent = threading.Event()
    with lingering() as sent, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, sent:  # phosd then has the last descriptor of it
                body = hello()
                for sequence in (1, 2):
                    if not connection.recv(4096):
                        return
                    head = (wire.MAGIC, 1, Type.HELLO | wire.REPLY, sequence, 0, len(body), 0)
                    fds = [sent.fileno()] if when == "answer" else []
                    socket.send_fds(connection, [wire.HEADER.pack(*head)], fds)
                    connection.sendall(body)
                    if when != "answer":
                        socket.send_fds(connection, [b"x"], [sent.fileno()])
                    all_sent.set()
                    if when == "unread":
                        return

        def attacked() -> None:
            with contextlib.suppress(PhosError), HookLink(os.getpid(), runtime) as link:
                link.hello()
                all_sent.wait(10)
                if when == "after":
                    link.hello()

        hook = threading.Thread(target=answer)
        hook.start()
        engine = threading.Thread(target=attacked, daemon=True)
        engine.start()
        hook.join(10)
        engine.join(10)
        assert not engine.is_alive(), "phosd waits for somebody else's peer"
        with pytest.raises(Distrusted):
            HookLink(os.getpid(), runtime).connect()


def test_thousands_that_are_distrusted_cost_little_and_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[ProcessId] = []
    living: set[ProcessId] = set()

    def lives(process: ProcessId) -> bool:
        looks.append(process)
        return process in living

    monkeypatch.setattr(distrust, "_processes", set())
    monkeypatch.setattr(distrust, "_most", distrust._FEW)
    monkeypatch.setattr(distrust, "_lives", lives)
    for pid in range(1, 1001):
        living.add(ProcessId(pid, 1))
        distrust.distrust(Peer(ProcessId(pid, 1)))
    assert distrust._processes == living
    assert len(looks) < 4 * len(living)
    living.clear()
    for pid in range(1001, 3000):
        distrust.distrust(Peer(ProcessId(pid, 1)))
    assert len(distrust._processes) <= distrust._FEW + 1


def test_a_phosd_that_may_not_give_folders_says_so(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without CAP_CHOWN; nothing is left in the place of the user's folder."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError

    place = places.place_outside(runtime, os.getpid())
    place.folder.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(os, "chown", refused)
    with pytest.raises(Unsupported, match="phosd may not give a folder to user 0, in which"):
        place.made()
    assert not place.folder.exists()
