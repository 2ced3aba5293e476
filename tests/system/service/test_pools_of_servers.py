"""The real daemon and engine: a pool of servers that were saved listening on one TCP port."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.program.namespace_maker import end
from phosd.engine.system import memory_mount, pid_namespaces, tcp
from tests.node.checkpoint_restore.conftest import place, undisturbed
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.support.bus import busctl
from tests.support.harness import PATIENCE, start, wait_until
from tests.support.service import MANAGER, ROOT
from tests.system.service.test_end_to_end import NAME, phos, phos_ended, phosd
from tests.system.service.test_metrics import free_port
from tests.system.service.test_pools import wait_for
from tests.system.service.test_sleepers import Server, asked, connected, is_right, server

__all__ = ["place", "server", "undisturbed"]


@pytest.fixture(autouse=True)
def _nothing_left(place: Path) -> Iterator[None]:
    yield
    for left in pid_namespaces.living(place / "run"):
        end(left)
    while (place / "run/memory").is_mount():
        assert memory_mount.unmount(place / "run/memory") == ""


def doors(bus: str, place: Path, pid: str) -> list[tuple[str, int]]:
    """Where a process listens, as it is told."""
    found = json.loads(phos_ended(bus, place, "ps", "--json", pid).stdout)["doors"]
    return [(host, int(port)) for host, _, port in (each.rpartition(":") for each in found)]


def answer(at: tuple[str, int]) -> tuple[int, str]:
    with socket.create_connection(at) as caller:
        caller.settimeout(PATIENCE)
        return asked(caller)


def test_servers_of_one_port_answer_side_by_side(
    bus: str, place: Path, server: Server, undisturbed: Undisturbed
) -> None:
    """With the original, and each goes on from where it was saved; a call that is repeated with its
    token by whoever did not hear of the first starts no other one.
    """
    target = server("chat", 0, "tcp")
    with phosd(bus, place):
        with connected(place, "chat") as caller:
            assert [asked(caller)[0] for _ in range(2)] == [0, 1]
        image = str(phos(bus, place, "checkpoint", str(target.pid))[-1]["result"])
        refused = phos_ended(bus, place, "restore", image, "--clone", "--clone-ports", "refuse")
        assert refused.returncode and "the TCP port" in refused.stderr
        phos(bus, place, "pool", "create", "chat", image, "--hollow", "1", "--max", "3")
        wait_for(bus, place, waiting=1, trouble=None)
        started = [phos(bus, place, "start", "chat")[-1] for _ in range(2)]
        found = {str(job["result"]): doors(bus, place, str(job["result"])) for job in started}
        for job in started:
            ((host, port),) = found[str(job["result"])]
            notes = job["notes"]
            assert isinstance(notes, list) and f"it listens on {host}:{port}" in notes, notes
        places = [each for (each,) in found.values()]
        assert len({*places, ("127.0.0.1", int((place / "chat.sock.port").read_text()))}) == 3
        for each in places:
            for step in (2, 3):
                told = answer(each)
                assert told[0] == step and is_right(undisturbed, told)
        with connected(place, "chat") as caller:
            assert asked(caller)[0] == 2, "the original is called as before"

        once = ("StartPooled", "sa{sv}", "chat", "1", "token", "s", "once")
        begun = busctl(bus, "call", NAME, ROOT, MANAGER, *once)
        wait_for(bus, place, running=3)
        wait_until(lambda: _ended(bus, begun), "the start to end")
    with phosd(bus, place):
        assert busctl(bus, "call", NAME, ROOT, MANAGER, *once) == begun
        assert _ended(bus, begun)
        assert [answer(each)[0] for each in places] == [4, 4]
        wait_for(bus, place, running=3, waiting=0)


def _ended(bus: str, job: str) -> bool:
    told = busctl(bus, "get-property", NAME, job.split('"')[1], "org.phos.Job1", "State")
    return told.strip() == 's "done"'


PAGE = Path(__file__).parents[3] / "docs/operate/pools.md"
_UNIT = re.compile(r"`/etc/systemd/system/([^`]+)`:\n\n```ini\n(.*?)```", re.DOTALL)


@pytest.mark.rotated(of=2)
def test_the_page_is_followed_from_a_server_to_one_that_a_request_starts(
    bus: str, place: Path, undisturbed: Undisturbed
) -> None:
    """Word by word; ``systemd-socket-activate`` stands in for systemd."""
    page = PAGE.read_text()
    commands = [shlex.split(line)[1:] for line in re.findall(r"(?m)^\$ (phos .*)$", page)]
    run, save, create, look, begin = commands[:5]
    units = dict(_UNIT.findall(page))
    assert units.keys() == {"chat.socket", "chat.service"}
    port, start_it = free_port(), shlex.split(_setting(units["chat.service"], "ExecStart"))
    assert _setting(units["chat.socket"], "ListenStream") == "127.0.0.1:8000"
    assert (start_it[:3], start_it[-2:]) == (["phos", "start", "chat"], ["--idle", "5min"])
    called = [sys.executable, "-m", "phosd.cli.main", "--bus", bus]
    with phosd(bus, place):
        assert run[-2:] == ["python", "serve.py"]
        target = start(
            *("serving", place),
            runtime=place / "run",
            interpreter=(*called, *run[:-2], sys.executable),
            arguments=("0", str(place / "chat.sock"), "tcp"),
            extra={"XDG_STATE_HOME": str(place / "home")},
        )
        wait_until((place / "chat.sock.port").exists, "it to listen")
        with connected(place, "chat") as caller:
            assert asked(caller)[0] == 0
        phos(bus, place, *save)
        target.process.wait(60)
        phos(bus, place, *create)
        wait_for(bus, place, waiting=2, trouble=None)
        assert "2 of 2" in phos_ended(bus, place, *look).stdout
        pid = phos_ended(bus, place, *begin).stdout.strip()
        assert answer(doors(bus, place, pid)[0])[0] == 1
        os.kill(int(pid), signal.SIGKILL)
        wait_for(bus, place, waiting=2, running=0)

        kept = {"PHOS_RUNTIME_DIR": str(place / "run"), "PYTHONPATH": str(PAGE.parents[2])}
        given = [f"--setenv={name}={value}" for name, value in kept.items()]
        listens = ["systemd-socket-activate", f"--listen=127.0.0.1:{port}", *given]
        for idle in ("5min", "1s"):
            with subprocess.Popen([*listens, *called, *start_it[1:-1], idle]) as service:
                wait_until(lambda: _listens(port), "systemd to listen")
                told = answer(("127.0.0.1", port))
                assert told[0] == 1 and is_right(undisturbed, told)
                if idle == "5min":
                    wait_for(bus, place, running=1)
                    assert answer(("127.0.0.1", port))[0] == 2, "the same program"
                    service.terminate()
                assert service.wait(60) == 0
            wait_for(bus, place, running=0, waiting=2)


def _setting(unit: str, name: str) -> str:
    (found,) = re.findall(rf"(?m)^{name}=(.*)$", unit)
    return str(found)


def _listens(port: int) -> bool:
    return any(
        each.here[1] == port and each.state == tcp.State.LISTENING
        for each in tcp.tcp_sockets(os.getpid())
    )
