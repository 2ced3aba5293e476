"""The real daemon and engine: programs that sleep until somebody calls them."""

import contextlib
import json
import os
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.node.checkpoint_restore.conftest import place, undisturbed
from tests.node.checkpoint_restore.cycle import Undisturbed
from tests.support.harness import PATIENCE, Target, start, wait_until
from tests.system.service.test_end_to_end import phos, phos_ended, phosd
from tests.system.service.test_metrics import free_port, scrape

__all__ = ["place", "undisturbed"]

Server = Callable[..., Target]


@pytest.fixture
def server(place: Path) -> Iterator[Server]:
    """Starts servers by a name each; nothing is left of them afterwards."""
    found: list[Target] = []

    def started(name: str, thinks: float = 0, *only: str) -> Target:
        path = place / f"{name}.sock"
        extra = {"PHOS_TEST_THINKS": str(thinks)}
        words = ("0", str(path), *only)
        found.append(start("serving", place, runtime=place / "run", arguments=words, extra=extra))
        wait_until(Path(f"{path}.port").exists, f"{name} to listen")
        return found[-1]

    yield started
    for each in found:
        each.kill()


@contextlib.contextmanager
def connected(place: Path, name: str, *, remotely: bool = True) -> Iterator[socket.socket]:
    """A connection to a server, by TCP or by its unix socket."""
    path = place / f"{name}.sock"
    if remotely:
        caller = socket.create_connection(("127.0.0.1", int(Path(f"{path}.port").read_text())))
    else:
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(str(path))
    with caller:
        caller.settimeout(PATIENCE)
        yield caller


def asked(caller: socket.socket) -> tuple[int, str]:
    """A step, and what it computed."""
    caller.sendall(b"next\n")
    step, digest = caller.makefile().readline().split()
    return int(step), digest


def is_right(undisturbed: Undisturbed, answer: tuple[int, str]) -> bool:
    step, digest = answer
    return undisturbed("single", step + 1)[step] == digest


def forget_that_it_sleeps(history: Path) -> None:
    """Make the history say that it is awake: phosd was killed when it was just frozen."""
    with contextlib.closing(sqlite3.connect(history)) as database, database:
        ((told,),) = database.execute("select told from sleepers").fetchall()
        known = json.loads(told)
        assert known["suspension"]
        known["suspension"] = ""
        database.execute("update sleepers set told = ?", [json.dumps(known)])


def state(bus: str, place: Path, target: Target) -> tuple[object, object, object]:
    (row,) = [row for row in phos(bus, place, "ps") if row["pid"] == target.pid]
    return row["state"], row["hollow"], row["wakes"]


def wait_for(bus: str, place: Path, target: Target, *wanted: object) -> None:
    wait_until(lambda: state(bus, place, target) == wanted, f"{wanted}", every=0.2)


ASLEEP = ("suspended", True, True)
AWAKE = ("running", False, True)
AS_ANY = ("running", False, False)


@pytest.mark.parametrize("remotely", [True, False], ids=["tcp", "unix"])
def test_it_wakes_when_somebody_connects(
    bus: str, place: Path, server: Server, undisturbed: Undisturbed, remotely: bool
) -> None:
    """It takes the call itself, and what it had computed counts; it stays awake then."""
    target = server("chat")
    with phosd(bus, place):
        with connected(place, "chat") as caller:
            assert asked(caller)[0] == 0
        phos(bus, place, "suspend", str(target.pid), "--wake")
        wait_for(bus, place, target, *ASLEEP)
        time.sleep(0.5)
        assert state(bus, place, target) == ASLEEP, "nobody has called"
        with connected(place, "chat", remotely=remotely) as caller:
            answer = asked(caller)
        assert answer[0] == 1 and is_right(undisturbed, answer)
        wait_for(bus, place, target, *AS_ANY)
        woken = [job for job in phos(bus, place, "history") if job["operation"] == "resume"]
        assert [(job["state"], job["target"]) for job in woken] == [("done", str(target.pid))]
        phos(bus, place, "suspend", str(target.pid), "--hollow")
        with connected(place, "chat") as caller:
            caller.settimeout(1)
            with pytest.raises(TimeoutError):
                asked(caller)
            phos(bus, place, "suspend", str(target.pid), "--wake")
        wait_for(bus, place, target, *AS_ANY)


@pytest.mark.rotated(of=3)
def test_it_wakes_by_what_is_sent_on_a_connection(
    bus: str, place: Path, server: Server, undisturbed: Undisturbed
) -> None:
    """A client that keeps its connection does not know that the server sleeps. One that closes it
    wakes nobody.
    """
    target = server("chat")
    with phosd(bus, place), connected(place, "chat") as kept:
        with connected(place, "chat") as other:
            assert asked(kept)[0] == 0 and asked(other)[0] == 1
            phos(bus, place, "suspend", str(target.pid), "--wake")
            wait_for(bus, place, target, *ASLEEP)
        time.sleep(1)
        assert state(bus, place, target) == ASLEEP
        answer = asked(kept)
        assert answer[0] == 2 and is_right(undisturbed, answer)


def test_it_falls_asleep_again(
    bus: str, place: Path, server: Server, undisturbed: Undisturbed
) -> None:
    """A phosd that is restarted knows it still; a resumption by hand ends it."""
    target = server("chat")
    pid, port = str(target.pid), free_port()
    (place / "phosd.toml").write_text(f'metrics = "127.0.0.1:{port}"\n')
    with phosd(bus, place):
        phos(bus, place, "suspend", pid, "--idle", "1")
        wait_until(lambda: scrape(port)["phosd_asleep_programs", ()] == 1, "one that sleeps")
        for step in range(2):
            wait_for(bus, place, target, *ASLEEP)
            with connected(place, "chat") as caller:
                assert asked(caller)[0] == step
                assert state(bus, place, target) == AWAKE
        wait_for(bus, place, target, *ASLEEP)
    forget_that_it_sleeps(place / "state/history.db")
    with phosd(bus, place):
        with connected(place, "chat") as caller:
            answer = asked(caller)
        assert answer[0] == 2 and is_right(undisturbed, answer)
        wait_for(bus, place, target, *AWAKE)
        # It may be falling asleep at this very moment.
        wait_until(lambda: not phos_ended(bus, place, "resume", pid).returncode, "it to be awake")
        wait_for(bus, place, target, *AS_ANY)
        phos(bus, place, "suspend", pid, "--idle", "1")
    with phosd(bus, place):
        wait_for(bus, place, target, *ASLEEP)
        phos(bus, place, "suspend", pid)  # its contexts, too
        wait_for(bus, place, target, "suspended", False, False)
        phos(bus, place, "resume", pid)
        wait_for(bus, place, target, *AS_ANY)
        time.sleep(2)
        assert state(bus, place, target) == AS_ANY
        told = [event for event in phos(bus, place, "events") if event["kind"] == "sleeper"]
        assert len(told) == 2
        assert all("somebody has resumed or suspended it" in str(event["text"]) for event in told)


def test_it_does_not_become_ready(bus: str, place: Path, server: Server) -> None:
    """Whoever calls it would wait for ever."""
    target = server("chat")
    with phosd(bus, place):
        phos(bus, place, "suspend", str(target.pid), "--idle", "1")
        wait_for(bus, place, target, *ASLEEP)
        refused = phos_ended(bus, place, "resume", str(target.pid), "--ready")
        assert refused.returncode and "when somebody calls it, and would stand" in refused.stderr
        assert state(bus, place, target) == ASLEEP
        lines = phos_ended(bus, place, "--json", "status").stdout.splitlines()
        (row,) = (each for each in map(json.loads, lines) if target.pid in each["pids"])
        assert row["levels"] == ["asleep"]
        with connected(place, "chat") as caller:
            assert asked(caller)[0] == 0


@pytest.mark.rotated(of=3)
def test_who_works_is_left_awake(bus: str, place: Path, server: Server) -> None:
    target = server("chat")
    with phosd(bus, place), connected(place, "chat") as caller:
        phos(bus, place, "suspend", str(target.pid), "--idle", "2")
        until = time.monotonic() + 6
        while time.monotonic() < until:
            asked(caller)
        resting = [job for job in phos(bus, place, "history") if job["operation"] == "suspend"]
        assert len(resting) == 1


@pytest.mark.rotated(of=3)
def test_who_works_on_an_answer_is_left_awake(
    bus: str, place: Path, server: Server, undisturbed: Undisturbed
) -> None:
    """It has read the question and launches nothing for longer than it may be idle; it is not
    frozen with what nobody else would wake it for.
    """
    target = server("chat", thinks=4)
    with phosd(bus, place):
        phos(bus, place, "suspend", str(target.pid), "--idle", "1")
        wait_for(bus, place, target, *ASLEEP)
        with connected(place, "chat") as caller:
            caller.settimeout(20)
            called = time.time()
            answer = asked(caller)
            assert answer[0] == 0 and is_right(undisturbed, answer)
            jobs = phos(bus, place, "history", "--operation", "suspend")
            began = [float(str(job["started"])) for job in jobs]
            # It thinks for 4 s from when it has read the question, which is after the call.
            assert not [each for each in began if called + 1 < each < called + 3], began
        wait_for(bus, place, target, *ASLEEP)
        phos(bus, place, "resume", str(target.pid))
        with connected(place, "chat") as caller:
            caller.settimeout(20)
            caller.sendall(b"next\n")
            time.sleep(0.5)
            phos(bus, place, "suspend", str(target.pid), "--wake")
            step, digest = caller.makefile().readline().split()
            assert is_right(undisturbed, (int(step), digest))


@pytest.mark.rotated(of=3)
def test_two_that_have_room_for_one(
    bus: str, place: Path, server: Server, undisturbed: Undisturbed
) -> None:
    """The one that is called gets the place of the one that has nothing to do."""
    one, other = server("one"), server("other")
    names = {"one": one, "other": other}
    with phosd(bus, place):
        for each in names.values():
            phos(bus, place, "suspend", str(each.pid), "--idle", "600")
        with connected(place, "one") as caller:
            assert asked(caller)[0] == 0
        undisturbed("single", 3)  # before the GPU is full: what was computed once is kept
        full = start("filler", place, hooked=False, arguments=("0", str(4 << 20)))
        try:
            wait_until(lambda: b"took" in full.log.read_bytes(), "the memory to be taken")
            for name, step in (("other", 0), ("one", 1), ("other", 1)):
                time.sleep(1.5)
                with connected(place, name) as caller:
                    answer = asked(caller)
                assert answer[0] == step and is_right(undisturbed, answer)
                for which, target in names.items():
                    wait_for(bus, place, target, *(AWAKE if which == name else ASLEEP))
            with connected(place, "other") as caller:
                phos(bus, place, "resume", str(other.pid))
                assert asked(caller)[0] == 2
                with connected(place, "one") as in_vain:
                    in_vain.settimeout(3)
                    with pytest.raises(TimeoutError):
                        asked(in_vain)
                assert state(bus, place, other) == AS_ANY, "it is to stay awake"
        finally:
            full.kill()


@pytest.mark.rotated(of=3)
def test_who_dies_in_its_sleep_leaves_its_port(bus: str, place: Path, server: Server) -> None:
    target = server("chat")
    port = int((place / "chat.sock.port").read_text())
    with phosd(bus, place):
        phos(bus, place, "suspend", str(target.pid), "--wake")
        wait_for(bus, place, target, *ASLEEP)
        os.kill(target.pid, signal.SIGKILL)

        def free() -> bool:
            with contextlib.suppress(OSError):
                socket.create_server(("127.0.0.1", port)).close()
                return True
            return False

        wait_until(free, "the port to be free")


def test_nothing_would_wake_it(bus: str, place: Path) -> None:
    target = start("single", place, runtime=place / "run")
    try:
        target.wait_for_steps(2)
        with phosd(bus, place):
            refused = phos_ended(bus, place, "suspend", str(target.pid), "--wake")
            assert refused.returncode and "it listens on no socket" in refused.stderr
            assert state(bus, place, target) == AS_ANY
    finally:
        target.kill()
