"""The real daemon and engine: a pool of servers that were saved listening on one TCP port."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.program.namespace_maker import end
from phosd.engine.system import memory_mount, pid_namespaces
from tests.node.checkpoint_restore.conftest import place, undisturbed
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.support.bus import busctl
from tests.support.harness import PATIENCE, wait_until
from tests.support.service import MANAGER, ROOT
from tests.system.service.test_end_to_end import NAME, phos, phos_ended, phosd
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
            assert isinstance(notes, list) and f"it listens on {host}:{port}" in notes
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
