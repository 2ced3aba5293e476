"""What cannot be saved is named before anything is stopped; the program goes on."""

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace

import pytest

from phosd.engine.criu.dump.check import check
from phosd.engine.program import tree
from phosd.engine.system import procfs
from phosd.errors import InvalidOption, NoSuchProcess, Unsupported
from tests.node.criu.life import COUNTER, USER, Life, in_order, wait_for
from tests.support.harness import halt

CALL = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
OPENED = {
    "io_uring": (
        CALL + "params = ctypes.create_string_buffer(120)\n"
        "assert libc.syscall(425, 8, params) > 0\n",
        r"anon_inode:\[io_uring\].*`phos run`",
    ),
    "userfaultfd": (CALL + "assert libc.syscall(323, 1) > 0\n", r"userfaultfd"),
    "vsock": ("import socket\ns = socket.socket(socket.AF_VSOCK)\n", r"AF_VSOCK"),
    "device": ("fd = open('/dev/fuse', 'r+b', buffering=0)\n", r"/dev/fuse.* is a device"),
    "sysv": (
        CALL + "libc.shmat.restype = ctypes.c_void_p\n"
        "id = libc.shmget(0, 4096, 0o1600)\nassert libc.shmat(id, None, 0) != 2**64 - 1\n"
        "libc.shmctl(id, 0, None)\n",
        "System V shared memory",
    ),
}


@pytest.mark.parametrize("kind", OPENED)
def test_what_cannot_be_saved_is_named(life: Life, kind: str) -> None:
    source, message = OPENED[kind]
    life.start(source + COUNTER)
    life.counts_on()
    with pytest.raises(Unsupported, match=message):
        life.dump()
    assert in_order(life.counts_on())


WATCHING = CALL + "fd = libc.inotify_init1(0)\nassert libc.inotify_add_watch(fd, b'/', 2) > 0\n"


def test_what_watches_files_is_saved_for_root_alone(lives: Callable[[int], Life]) -> None:
    """CRIU of a user cannot look up what is watched; it used to fail inside the stop."""
    for source, uid in ((WATCHING, 0), (WATCHING.partition("assert")[0], USER)):
        saved = lives(uid)
        saved.start(source + COUNTER)
        saved.counts_on()
        saved.again()
        saved.counts_on()
    refused = lives(USER)
    refused.start(WATCHING + COUNTER)
    refused.counts_on()
    with pytest.raises(Unsupported, match=r"inotify.* watches files"):
        refused.dump()
    refused.counts_on()


def test_a_unix_connection_to_the_outside_is_named(life: Life) -> None:
    path = life.home / "server"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        life.start(f"import socket\ns = socket.socket(1)\ns.connect({str(path)!r})\n" + COUNTER)
        connection, _ = server.accept()
        life.counts_on()
        with connection, pytest.raises(Unsupported, match=rf"connected to {path}, outside the pr"):
            life.dump()


def test_a_thread_that_just_asks_phosd_for_a_checkpoint_is_no_hindrance(life: Life) -> None:
    """The hook has closed the connection before CRIU looks."""
    path = life.home / "program.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        life.start(f"import socket\ns = socket.socket(1)\ns.connect({str(path)!r})\n" + COUNTER)
        connection, _ = server.accept()
        life.counts_on()
        with connection:
            check(life.criu, tree.scan(life.pid))


CONNECTED = """
import socket, sys, threading, time
port = int(sys.argv[1])
connection = socket.create_connection(("127.0.0.1", port))
listener = socket.create_server(("127.0.0.1", 0))
open("port", "w").write(str(listener.getsockname()[1]))
def answer():
    while True:
        listener.accept()[0].sendall(b"here")
threading.Thread(target=answer, daemon=True).start()
connection.settimeout(0.001)
value = 0
while True:
    value += 1
    try:
        closed = connection.recv(1) == b""
    except TimeoutError:
        closed = False
    except OSError:
        closed = True
    if closed:
        open("closed", "w").close()
    print(value, flush=True)
    time.sleep(0.005)
"""


@pytest.mark.parametrize("uid", [0, USER])
def test_tcp_connections_are_refused_or_closed_as_asked(
    lives: Callable[[int], Life], uid: int
) -> None:
    life = lives(uid)
    with socket.create_server(("127.0.0.1", 0)) as server:
        life.start(CONNECTED, str(server.getsockname()[1]))
        peer, _ = server.accept()
        life.counts_on()
        with pytest.raises(Unsupported, match=r"connected TCP socket \(`--tcp close"):
            life.dump(tcp="refuse")
        life.images.rmdir()
        life.dump(tcp="close")
        life.counts_on()
        assert not (life.home / "closed").exists(), "the dump leaves the connection alone"
        life.kill()
        peer.close()
    life.restore()
    assert in_order(life.counts_on())
    assert wait_for((life.home / "closed").exists), "the program sees a closed connection"
    port = int((life.home / "port").read_text())
    with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        assert client.recv(4) == b"here", "the listening socket lives on"


def test_an_unknown_tcp_policy_is_an_invalid_option(life: Life) -> None:
    life.start(COUNTER)
    with pytest.raises(InvalidOption, match="there is no tcp policy 'maybe'"):
        check(life.criu, tree.scan(life.pid), tcp="maybe")


MAPS = (
    "import mmap, sys\n"
    "with open(sys.argv[1], 'rb') as file:\n"
    "    table = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n" + COUNTER
)


def test_a_mapped_file_that_was_replaced_where_the_owner_cannot_write(
    lives: Callable[[int], Life],
) -> None:
    """As a library is by an update of the system: its restore would need the file."""
    life = lives(USER)
    folder = life.home / "system"
    folder.mkdir(mode=0o755)
    library = folder / "library"
    library.write_bytes(b"old" * 5000)
    life.start(MAPS, str(library))
    life.counts_on()
    new = folder / "new"
    new.write_bytes(b"new" * 5000)
    new.rename(library)
    with pytest.raises(Unsupported, match=r"maps .*/library \(deleted\), which was replaced since"):
        life.dump()
    life.counts_on()


@pytest.mark.parametrize("uid", [0, USER])
def test_a_mapped_file_that_was_replaced_where_the_owner_can_write(
    uid: int, lives: Callable[[int], Life]
) -> None:
    life = lives(uid)
    mine = life.home / "mine"
    mine.write_bytes(b"old" * 5000)
    os.chown(mine, uid, uid)
    life.start(MAPS, str(mine))
    life.counts_on()
    mine.unlink()
    mine.write_bytes(b"new" * 5000)
    life.again()
    assert in_order(life.counts_on())
    assert mine.read_bytes() == b"new" * 5000


def test_a_program_in_a_container_is_refused(life: Life) -> None:
    life.start(
        "import os, subprocess, sys\n"
        "if len(sys.argv) == 1:\n"
        "    os.execvp('unshare', ['unshare', '-m', sys.executable, '-S', 'program.py', 'in'])\n"
        + COUNTER
    )
    life.counts_on()
    with pytest.raises(Unsupported, match=r"in a container or sandbox \(its own mnt namespace\)"):
        life.dump()


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_a_traced_program_is_refused_naming_its_tracer(
    life: Life, *, first: bool, stopped: bool
) -> None:
    """As of strace and debuggers, which may hold any one of its threads, or stop it."""
    sleeper = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,)).start()\n"
    life.start(sleeper + COUNTER)
    life.counts_on()
    thread = min(procfs.threads(life.pid)) if first else max(procfs.threads(life.pid))
    attached, done = os.pipe(), os.pipe()
    tracer = os.fork()
    if tracer == 0:
        ptrace = ctypes.CDLL(None).ptrace
        ptrace(0x4206, thread, None, None)  # PTRACE_SEIZE
        if stopped:
            ptrace(0x4207, thread, None, None)  # PTRACE_INTERRUPT
        os.write(attached[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    os.read(attached[0], 1)
    try:
        with pytest.raises(Unsupported, match=rf"is being traced by pid {tracer} \(.*\(detach"):
            life.dump()
    finally:
        os.write(done[1], b"x")
        os.waitpid(tracer, 0)
        for end in (*attached, *done):
            os.close(end)
    assert in_order(life.counts_on())


def test_pids_that_are_no_programs(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoSuchProcess, match="does not exist"):
        tree.scan(free_pid())
    with monkeypatch.context() as patch:  # no kernel thread can be seen in a pid namespace
        own = procfs.stat(os.getpid())
        assert own is not None
        patch.setattr(procfs, "stat", lambda pid: replace(own, of_kernel=True))
        with pytest.raises(NoSuchProcess, match="thread of the kernel"):
            tree.scan(os.getpid())
    zombie = subprocess.Popen(["true"])
    wait_for(lambda: (found := procfs.stat(zombie.pid)) is not None and found.dead)
    with pytest.raises(NoSuchProcess, match="has ended and waits for its parent"):
        tree.scan(zombie.pid)
    zombie.wait()


def test_a_program_without_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each is for a moment in its ``execve``."""
    monkeypatch.setattr(procfs, "command_line", lambda pid: ())
    assert tree.scan(os.getpid()).root.command == ()


def test_a_thread_is_no_process(life: Life) -> None:
    life.start(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n" + COUNTER
    )
    life.counts_on()
    (thread,) = set(procfs.threads(life.pid)) - {life.pid}
    with pytest.raises(NoSuchProcess, match=f"{thread} is a thread of process {life.pid}"):
        tree.scan(thread)


def free_pid() -> int:
    limit = int((procfs.PROC / "sys/kernel/pid_max").read_text())
    return next(pid for pid in range(limit - 1, 2, -1) if procfs.stat(pid) is None)


def test_zombies_in_the_tree_are_saved_with_it(life: Life) -> None:
    life.start("import os\nif os.fork() == 0:\n    os._exit(3)\n" + COUNTER)
    life.counts_on()
    wait_for(lambda: [p.dead for p in tree.scan(life.pid)] == [False, True])
    life.again()
    assert in_order(life.counts_on())
    assert [p.dead for p in tree.scan(life.pid)] == [False, True]


def test_a_stopped_program_stays_stopped(life: Life) -> None:
    life.start(COUNTER)
    life.counts_on()
    halt(life.pid)
    life.again()
    found = procfs.stat(life.pid)
    assert found is not None
    assert found.state == "T"
    os.kill(life.pid, signal.SIGCONT)
    assert in_order(life.counts_on())


def test_a_program_that_opens_and_closes_all_the_time_can_be_looked_at(life: Life) -> None:
    busy = "import os, threading\ndef churn():\n    while True:\n        os.close(os.dup(1))\n"
    life.start(busy + "threading.Thread(target=churn, daemon=True).start()\n" + COUNTER)
    life.counts_on()
    for _ in range(20):
        assert check(life.criu, tree.scan(life.pid)).endpoints == ()
