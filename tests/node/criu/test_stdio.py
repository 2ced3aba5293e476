"""Output that led to a pipe, a terminal or a socket whose other end is not part of the program."""

import contextlib
import os
import pty
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phosd.engine.criu.dump import dump as criu_dump
from phosd.engine.criu.dump.dump import DumpOptions
from phosd.engine.criu.files import stdio
from phosd.engine.criu.restore import admission
from phosd.engine.criu.restore import restore as criu_restore
from phosd.engine.criu.restore.options import TreeRestoreOptions
from phosd.engine.image.cpu_manifest import EndpointKind
from phosd.engine.program import tree
from phosd.engine.system import procfs
from phosd.errors import Unsupported
from tests.node.criu.life import COUNTER, SYSTEM_PYTHON, USER, Life, in_order, wait_for

USERS = pytest.mark.parametrize("uid", [0, USER])


@contextlib.contextmanager
def drained(descriptor: int) -> Iterator[list[bytes]]:
    """Reads what comes out of ``descriptor``, as whoever started the program would."""
    seen: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is gone
            while data := os.read(descriptor, 4096):
                seen.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    yield seen
    thread.join()
    os.close(descriptor)


def live_on(life: Life, seen: list[bytes], kind: EndpointKind) -> Path:
    """Dump, kill and restore a program that prints; its output is in a file then."""
    wait_for(lambda: seen)
    dump = life.dump()
    assert kind in {endpoint.kind for endpoint in dump.details.endpoints}
    life.kill()
    output = life.home / "output"
    life.restore(output=output)
    values = life.counts_on(output)
    assert in_order(values)
    assert output.stat().st_uid == life.uid
    return output


@USERS
def test_a_pipe(lives: Callable[[int], Life], uid: int) -> None:
    life = lives(uid)
    reader, writer = os.pipe()
    life.start(COUNTER, stdout=writer, stderr=writer)
    os.close(writer)
    with drained(reader) as seen:
        live_on(life, seen, EndpointKind.PIPE)


@USERS
def test_a_terminal_of_its_own(lives: Callable[[int], Life], uid: int) -> None:
    life = lives(uid)
    controller, terminal = pty.openpty()
    os.fchown(terminal, uid, -1)
    claim = (
        "import fcntl, os, sys, termios\nfcntl.ioctl(1, termios.TIOCSCTTY, 0)\n"
        "def interactive():\n    assert sys.stdout.isatty()\n    open('/dev/tty').close()\n"
    )
    loop = COUNTER.replace("value += 1", "value += 1; interactive()")
    life.start(claim + loop, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    with drained(controller) as seen:
        live_on(life, seen, EndpointKind.TERMINAL)
        assert procfs.descriptors(life.pid)[1].target.startswith("/dev/pts/")


def test_a_terminal_of_another_user(lives: Callable[[int], Life]) -> None:
    """As that of a program started by `su`: refused at once, since a restore would fail."""
    life = lives(USER)
    controller, terminal = pty.openpty()
    life.start(COUNTER, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    with drained(controller) as seen:
        wait_for(lambda: seen)
        with pytest.raises(Unsupported, match="is a terminal of user 0, which only root"):
            life.dump()
        said = len(seen)
        wait_for(lambda: len(seen) > said)
        os.kill(life.pid, signal.SIGKILL)


def start_job(life: Life, terminal: int) -> None:
    """Start the counter as a shell would: in the session of somebody else, with its terminal."""
    (life.home / "program.py").write_text(COUNTER)
    (life.home / "shell.py").write_text(
        "import fcntl, os, subprocess, termios\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        f"job = subprocess.Popen([{SYSTEM_PYTHON!r}, '-S', 'program.py'], preexec_fn=os.setpgrp)\n"
        "open('pid', 'w').write(str(job.pid))\n"
        "job.wait()\n"
    )


@USERS
def test_a_job_of_a_shell(lives: Callable[[int], Life], uid: int) -> None:
    life = lives(uid)
    controller, terminal = pty.openpty()
    os.fchown(terminal, uid, -1)
    start_job(life, terminal)
    shell = subprocess.Popen(
        [SYSTEM_PYTHON, "-S", "shell.py"],
        cwd=life.home,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        user=uid,
        group=uid,
        extra_groups=[],
    )
    os.close(terminal)
    with drained(controller) as seen:
        wait_for(lambda: seen)
        written = life.home / "pid"
        pid = int(wait_for(lambda: written.exists() and written.read_text()))
        life.images.mkdir()
        assert not tree.scan(pid).own_session
        output = restored_job(life, pid, shell)
    assert in_order(life.counts_on(output))


def restored_job(life: Life, pid: int, shell: "subprocess.Popen[bytes]") -> Path:
    """The job, dumped, killed with its shell, and restored without any."""
    life.dumped = criu_dump.dump_tree(life.criu, tree.scan(pid), life.images, DumpOptions())
    assert life.dumped.details.shell_job
    life.record = life.dumped.record("images")
    os.kill(pid, signal.SIGKILL)
    shell.kill()
    shell.wait()
    output = life.home / "output"
    options = TreeRestoreOptions(output=output)
    admission.admission(life.criu, life.saved_tree, options)
    life.restored.append(criu_restore.restore_tree(life.criu, life.saved_tree, options))
    return output


@USERS
def test_the_journals_socket(lives: Callable[[int], Life], uid: int) -> None:
    life = lives(uid)
    journal = socket.socket(socket.AF_UNIX)
    journal.bind(str(life.home / "stdout"))
    journal.listen()
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(life.home / "stdout"))
    server, _ = journal.accept()
    life.start(COUNTER, stdout=client.fileno(), stderr=client.fileno())
    client.close()
    journal.close()
    with drained(server.detach()) as seen:
        live_on(life, seen, EndpointKind.SOCKET)


def test_output_that_nobody_wants_is_thrown_away(life: Life) -> None:
    reader, writer = os.pipe()
    life.start(COUNTER, stdout=writer)
    os.close(writer)
    with drained(reader) as seen:
        wait_for(lambda: seen)
        life.again()
    before = cpu_ticks(life.pid)
    wait_for(lambda: cpu_ticks(life.pid) > before)
    assert not list(life.home.glob("output"))


def cpu_ticks(pid: int) -> int:
    """Processor time that a living process has used."""
    found = procfs.stat(pid)
    assert found is not None
    assert not found.dead
    words = (procfs.PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    return int(words[11]) + int(words[12])


def test_a_second_checkpoint_of_a_program_on_a_relay(life: Life) -> None:
    reader, writer = os.pipe()
    life.start(COUNTER, stdout=writer)
    os.close(writer)
    with drained(reader) as seen:
        live_on(life, seen, EndpointKind.PIPE)
    life.images.rename(life.private / "first")
    life.dump()
    life.kill()
    output = life.home / "second"
    life.restore(output=output)
    assert in_order(life.counts_on(output))


def test_the_keeper_goes_when_the_program_goes(life: Life) -> None:
    before = keepers_of_all()
    reader, writer = os.pipe()
    life.start(COUNTER, stdout=writer)
    os.close(writer)
    with drained(reader) as seen:
        live_on(life, seen, EndpointKind.PIPE)
    keepers = keepers_of_all() - before
    assert keepers
    life.restored[-1].abandon()
    wait_for(lambda: all(procfs.stat(pid) is None or procfs.ending(pid) for pid in keepers))


def keepers_of_all() -> set[int]:
    return {
        pid for pid in procfs.pids() if "phosd.engine.criu.restore.restore_shim" in command(pid)
    }


def command(pid: int) -> tuple[str, ...]:
    try:
        return procfs.command_line(pid)
    except (FileNotFoundError, ProcessLookupError):
        return ()


def test_pipes_inside_the_tree_are_no_endpoints(life: Life) -> None:
    life.start("import os\nreader, writer = os.pipe()\n" + COUNTER)
    life.counts_on()
    found = tree.scan(life.pid)
    plan = stdio.plan(found, procfs.descriptors(life.pid))
    assert plan.endpoints == ()


def test_a_connection_to_the_syslog_is_made_again(life: Life) -> None:
    path = life.home / "syslog"
    syslog = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    syslog.bind(str(path))
    connect = (
        "import socket\nlog = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        f"log.connect({str(path)!r})\n"
    )
    life.start(connect + COUNTER.replace("value += 1", "value += 1; log.send(b'%d' % value)"))
    received: list[bytes] = []

    def receive() -> None:
        while data := syslog.recv(100):
            received.append(data)

    thread = threading.Thread(target=receive)
    thread.start()
    life.counts_on()
    life.again()
    before = len(received)
    wait_for(lambda: len(received) > before + 3)
    assert in_order(life.counts_on())
    syslog.shutdown(socket.SHUT_RDWR)
    thread.join()
    syslog.close()
