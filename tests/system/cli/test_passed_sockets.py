"""``phos start --serve``: what is refused, and what ends with what."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.cli import passed_sockets
from phosd.cli.passed_sockets import (
    Served,
    only_door,
    require_proxy,
    require_sockets,
)
from phosd.client.errors import CommandError
from tests.support.harness import wait_until
from tests.system.cli.test_client import PHOS

SLEEPS = ["sleep", "600"]


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def program() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(SLEEPS) as sleeping:
        yield sleeping
        sleeping.kill()


def test_without_a_socket_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        [*PHOS, "--bus", "unix:path=/none", "start", "chat", "--serve"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "no socket was passed" in done.stderr
    for count, pid in (("1", os.getppid()), ("0", os.getpid()), ("x", os.getpid())):
        monkeypatch.setenv("LISTEN_FDS", count)
        monkeypatch.setenv("LISTEN_PID", str(pid))
        with pytest.raises(CommandError, match="systemd-socket-activate"):
            require_sockets()
    monkeypatch.setenv("LISTEN_FDS", "2")
    assert require_sockets() == 2
    done = subprocess.run(
        [*PHOS, "start", "chat", "--idle", "5min"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "--serve" in done.stderr


@pytest.mark.parametrize(
    ("doors", "place"),
    [
        (["127.0.0.1:8000"], "127.0.0.1:8000"),
        (["0.0.0.0:8000"], "127.0.0.1:8000"),
        (["[::]:8000"], "[::1]:8000"),
        (["10.1.2.3:80"], "10.1.2.3:80"),
        (["/run/chat.sock"], "/run/chat.sock"),
        (["@chat"], "@chat"),
        (["0.0.0.0:80", "[::]:80"], "127.0.0.1:80"),
        (["10.1.2.3:80", "[::1]:80"], "[::1]:80"),
        (["10.1.2.3:80", "10.1.2.4:80"], "10.1.2.3:80"),
    ],
)
def test_where_the_proxy_finds_it(doors: list[str], place: str) -> None:
    assert only_door(7, doors) == place


@pytest.mark.parametrize(
    ("doors", "said"),
    [
        ([], "listened nowhere"),
        (["127.0.0.1:1", "127.0.0.1:2"], "without --serve"),
        (["127.0.0.1:1", "/run/chat.sock"], "without --serve"),
        (["/run/a.sock", "/run/b.sock"], "without --serve"),
    ],
)
def test_one_that_listens_on_more_or_less_is_refused(doors: list[str], said: str) -> None:
    with pytest.raises(CommandError, match=said) as caught:
        only_door(7, doors)
    assert caught.value.code == "Unsupported"


def test_the_program_ends_with_what_serves_it(program: "subprocess.Popen[bytes]") -> None:
    with pytest.raises(ValueError, match="mine"), Served(program.pid):
        raise ValueError("mine")
    assert program.wait(20) == -signal.SIGTERM
    with pytest.raises(CommandError, match="has ended by itself"):
        Served(program.pid)


def test_sigterm_ends_both(program: "subprocess.Popen[bytes]") -> None:
    with Served(program.pid):
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        time.sleep(20)
        pytest.fail("it went on")
    assert program.wait(20) == -signal.SIGTERM


TOLD_EARLY = """
import os, signal, sys
from phosd.cli.passed_sockets import Served, told_later
with told_later():
    os.kill(os.getpid(), signal.SIGTERM)
    with Served(int(sys.argv[1])) as served:
        served.take_signals()
        print("it went on")
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_a_signal_that_comes_while_it_is_started_ends_it(
    program: "subprocess.Popen[bytes]",
) -> None:
    words = [sys.executable, "-c", TOLD_EARLY, str(program.pid)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
    assert program.wait(20) == -signal.SIGTERM


def test_a_program_that_ends_ends_the_proxy(
    program: "subprocess.Popen[bytes]", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    with socket.create_server(("127.0.0.1", 0)) as passed:
        monkeypatch.setattr(passed_sockets, "_FIRST", passed.fileno())
        proxy = tmp_path / "proxy"
        monkeypatch.setenv("LISTEN_PIDFDID", "7")  # of a newer systemd: that of this process
        told = f"$LISTEN_PID $$ -$LISTEN_PIDFDID $(readlink /proc/$$/fd/{passed.fileno()}) $*"
        proxy.write_text(f'#!/bin/sh\necho "{told}" >{pid}\nexec sleep 600\n')
        proxy.chmod(0o755)

        def kill_it() -> None:
            wait_until(lambda: pid.exists() and pid.read_text(), "the proxy")
            program.kill()

        with pytest.raises(CommandError, match="ended by itself"), Served(program.pid) as served:
            threading.Thread(target=kill_it).start()
            served.serve(str(proxy), 1, "127.0.0.1:1", 300.0)
        inode = os.fstat(passed.fileno()).st_ino
    own, itself, other, *words = pid.read_text().split()
    assert own == itself and other == "-"
    assert words == [f"socket:[{inode}]", "--exit-idle-time=300s", "127.0.0.1:1"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(own), 0)


def test_a_proxy_that_fails_is_told(program: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    proxy = tmp_path / "proxy"
    proxy.write_text("#!/bin/sh\nexit 7\n")
    proxy.chmod(0o755)
    with pytest.raises(CommandError, match=r"proxy has failed \(7\)"), Served(program.pid) as one:
        one.serve(str(proxy), 0, "127.0.0.1:1", None)
    assert program.wait(20) == -signal.SIGTERM


def test_systemds_proxy_is_found() -> None:
    assert Path(require_proxy()).name == "systemd-socket-proxyd"
