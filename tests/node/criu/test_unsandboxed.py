"""CRIU outside of phosd's sandbox: the service that runs it, started as systemd would."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from phosd.engine.criu.dump.check import check
from phosd.engine.criu.run.program import Criu
from phosd.engine.program.tree import scan
from phosd.engine.system import procfs, unsandboxed
from phosd.engine.system.unsandboxed import Command, OutsideError
from phosd.errors import Internal, Unsupported
from tests.node.criu.life import COUNTER, SYSTEM_PYTHON, USER, Life, in_order, wait_for
from tests.support.harness import alive, wait_until

SCRIPT = Path(unsandboxed.__file__)
SHELL = {"PATH": "/usr/bin:/bin"}


def listens(address: Path) -> bool:
    """Whether connections are accepted; a moment before that, the socket has its name already."""
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
    return any(row[-1] == str(address) and row[3] == "00010000" for row in rows)


@contextmanager
def listening(tmp_path: Path, *around: str) -> Iterator[Path]:
    """The socket of a service like phosd-criu.socket: one instance for each connection."""
    address = tmp_path / "criu.sock"
    activate = ["systemd-socket-activate", f"--listen={address}", "--seqpacket", "--accept"]
    command = [SYSTEM_PYTHON, "-I", "-S", str(SCRIPT)]
    with (tmp_path / "service.log").open("w") as log:
        systemd = subprocess.Popen(
            [*around, *activate, *command], stderr=log, start_new_session=True
        )
    wait_until(lambda: listens(address), "the socket")
    address.chmod(0o600)
    try:
        yield address
    finally:
        os.killpg(systemd.pid, signal.SIGKILL)
        systemd.wait()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Path]:
    with listening(tmp_path) as address:
        yield address


def start(service: Path, *words: str, tied: bool = False, give: Sequence[int] = ()) -> Command:
    return Command(service, words, give, SHELL, tied=tied)


def end(command: Command) -> int:
    """Its exit status."""
    wait_until(lambda: command.poll() is not None, "the end of the command")
    command.close()
    assert command.returncode is not None
    return command.returncode


def test_status_errors_environment_and_descriptors(service: Path) -> None:
    reader, writer = os.pipe()
    high = 700
    os.dup2(writer, high)
    script = f"echo $HERE >&{high}; ls /proc/self/fd >&{high}; echo no >&2; exit 7"
    command = Command(
        service, ["/bin/bash", "-c", script], [high], SHELL | {"HERE": "there"}, tied=False
    )
    assert (end(command), command.said) == (7, "no\n")
    os.close(high)
    os.close(writer)
    told, *numbers = os.read(reader, 4096).decode().split()
    os.close(reader)
    assert told == "there"
    assert {"0", "1", "2", str(high)} <= {*numbers}
    assert len(numbers) == 5, "these, and the one that ls lists with"


def test_low_numbers_that_the_service_uses_itself(service: Path, tmp_path: Path) -> None:
    """A child of ours gives descriptors 3 to 12, whatever they are there."""
    client = (
        "import os, sys; from pathlib import Path\n"
        "from phosd.engine.system.unsandboxed import Command\n"
        "for n in range(3, 13):\n"
        "    fd = os.open(f'{sys.argv[2]}/{n}', os.O_WRONLY | os.O_CREAT)\n"
        "    fd == n or (os.dup2(fd, n), os.close(fd))\n"
        "words = ['/bin/bash', '-c', 'for n in {3..12}; do echo $n >&$n; done']\n"
        "command = Command(Path(sys.argv[1]), words, range(3, 13), {}, tied=False)\n"
        "while command.poll() is None: pass\n"
        "sys.exit(command.returncode)\n"
    )
    done = subprocess.run([sys.executable, "-c", client, str(service), str(tmp_path)], check=False)
    assert done.returncode == 0
    assert [(tmp_path / str(n)).read_text() for n in range(3, 13)] == [
        f"{n}\n" for n in range(3, 13)
    ]


def test_a_command_is_killed_on_request(service: Path) -> None:
    command = start(service, "/bin/sleep", "1000")
    assert command.poll() is None
    command.kill()
    assert end(command) == -signal.SIGKILL


@pytest.mark.parametrize("tied", [True, False])
def test_when_phosd_ends(service: Path, tmp_path: Path, tied: bool) -> None:
    """Only what is tied is killed: CRIU, killed in a dump, may leave the program with its code."""
    there, go = tmp_path / "there", tmp_path / "go"
    os.mkfifo(go)
    script = f"echo $$ >{there}.new; mv {there}.new {there}; read word <{go}; echo done >{there}"
    client = (
        "import sys, time; from pathlib import Path\n"
        "from phosd.engine.system.unsandboxed import Command\n"
        f"command = Command(Path({str(service)!r}), ['/bin/sh', '-c', {script!r}], [],"
        f" {SHELL!r}, tied={tied})\n"
        "time.sleep(1000)\n"
    )
    phosd = subprocess.Popen([sys.executable, "-c", client])
    wait_until(there.exists, "the command")
    pid = int(there.read_text())
    phosd.kill()
    phosd.wait()
    if tied:
        wait_until(lambda: not alive(pid), "its end")
        assert there.read_text() == f"{pid}\n"
    else:
        with go.open("w") as file:
            file.write("go on\n")
        wait_until(lambda: there.read_text() == "done\n", "it to do what is left")


def test_a_service_that_ends_without_a_word(service: Path) -> None:
    command = start(service, "/bin/sh", "-c", "kill -9 $PPID; sleep 1000 & echo $!")
    with pytest.raises(OutsideError, match="has ended"):
        wait_until(lambda: command.poll() is not None, "the end")
    command.close()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Open to all, as pytest's own folders are not."""
    with tempfile.TemporaryDirectory(prefix="phos-open-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


def test_nobody_else_has_commands_run(open_folder: Path) -> None:
    """Not even if the socket were open to all."""
    mark, log = open_folder / "mark", open_folder / "service.log"
    order = {"command": ["/usr/bin/touch", str(mark)], "descriptors": [], "environment": {}}
    client = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.connect(sys.argv[1])\n"
        "s.send(sys.argv[2].encode())\n"
        "print([s.recv(4096), s.recv(4096)])\n"
    )
    packet = json.dumps(order | {"tied": False})
    with listening(open_folder) as service:
        service.chmod(0o777)
        words = [SYSTEM_PYTHON, "-c", client, str(service), packet]
        ours = subprocess.run(words, capture_output=True, text=True, check=True)
        assert '"status": 0' in ours.stdout
        mark.unlink()
        theirs = subprocess.run(
            words,
            user=USER,
            group=USER,
            extra_groups=[],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "status" not in theirs.stdout
        assert not mark.exists()
        wait_for(lambda: f"user {USER} is at the other end" in log.read_text())


@pytest.mark.parametrize(
    "packet",
    [b"{", b"[]", b"{}", b'{"command": [], "descriptors": [9], "environment": {}, "tied": false}'],
)
def test_nonsense_runs_nothing(service: Path, packet: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(service))
        client.settimeout(30)
        assert b"mnt:" in client.recv(4096)
        client.send(packet)
        assert client.recv(4096) == b""


def test_dump_and_restore_in_the_service(
    service: Path, criu: Criu, lives: Callable[[int], Life]
) -> None:
    life = lives(USER)
    life.criu = Criu(criu.path, service)
    life.start(COUNTER)
    life.counts_on()
    life.again()
    assert in_order(life.counts_on())
    found = procfs.stat(life.pid)
    assert found is not None
    assert found.parent != os.getpid()


def test_output_that_is_kept_by_a_process_beside_the_program(
    service: Path, criu: Criu, life: Life
) -> None:
    life.criu = Criu(criu.path, service)
    reader, writer = os.pipe()
    life.start(COUNTER, stdout=writer)
    os.close(writer)
    assert os.read(reader, 1)
    life.dump()
    life.kill()
    os.close(reader)
    life.restore(output=life.home / "output")
    assert in_order(life.counts_on(life.home / "output"))


def test_a_service_in_a_sandbox_saves_nothing(criu: Criu, life: Life, tmp_path: Path) -> None:
    """The dump would return 0, and its image could never be restored."""
    with listening(tmp_path, "unshare", "--mount") as address:
        life.criu = Criu(criu.path, address)
        life.start(COUNTER)
        life.counts_on()
        with pytest.raises(Unsupported, match="sandbox \\(its own mnt namespace\\)"):
            life.dump()
        assert in_order(life.counts_on())


def test_a_sandbox_of_our_own_is_no_obstacle(
    service: Path, criu: Criu, life: Life, tmp_path: Path
) -> None:
    """As phosd has one under systemd; CRIU runs in the service's namespaces, not in ours."""
    life.start(COUNTER)
    life.counts_on()
    images = life.private / "images"
    images.mkdir()
    saving = (
        "import sys; from pathlib import Path\n"
        "from phosd.engine.program import tree; from phosd.engine.criu.run.program import Criu\n"
        "from phosd.engine.criu.dump.dump import DumpOptions, dump_tree\n"
        "pid, images, program, *service = sys.argv[1:]\n"
        "criu = Criu(Path(program), *map(Path, service))\n"
        "dump_tree(criu, tree.scan(int(pid)), Path(images), DumpOptions())\n"
    )
    sandbox = ["unshare", "--mount", sys.executable, "-c", saving]
    words = [*sandbox, str(life.pid), str(images), str(criu.path)]
    refused = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "sandbox (its own mnt namespace)" in refused.stderr
    done = subprocess.run([*words, str(service)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert in_order(life.counts_on())


def test_what_criu_says_there_is_told(
    service: Path, criu: Criu, life: Life, tmp_path: Path
) -> None:
    broken = tmp_path / "criu"
    broken.write_text("#!/bin/sh\necho not today >&2\nexit 3\n")
    broken.chmod(0o755)
    life.criu = Criu(broken, service)
    life.start(COUNTER)
    with pytest.raises(Internal, match=r"not today \(criu dump failed\)"):
        life.dump()
    life.counts_on()


def test_a_service_that_is_away(service: Path, criu: Criu, life: Life) -> None:
    """While its unit is restarted there is no socket. CRIU must not run in our sandbox then."""
    life.criu = Criu(criu.path, service)
    life.start(COUNTER)
    life.counts_on()
    check(life.criu, scan(life.pid))
    service.unlink()
    with pytest.raises(Internal, match=r"phosd-criu\.socket"):
        life.dump()
    assert in_order(life.counts_on())


def test_no_service_behind_the_socket(criu: Criu, life: Life, tmp_path: Path) -> None:
    """Then CRIU must not run in phosd's sandbox instead."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as gone:
        gone.bind(str(tmp_path / "criu.sock"))
    life.criu = Criu(criu.path, tmp_path / "criu.sock")
    life.start(COUNTER)
    life.counts_on()
    with pytest.raises(Internal, match=r"phosd-criu\.socket"):
        life.dump()
    assert in_order(wait_for(life.counts_on))
