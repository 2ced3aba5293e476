"""A program's user stops the CRIU that works for them. It delays nobody but themselves."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from phosd.engine.criu.dump.dump import Dump
from phosd.engine.criu.run import criu_watchdog
from phosd.engine.system import procfs
from phosd.errors import Internal, Timeout
from tests.node.criu.life import COUNTER, USER, Life, wait_for
from tests.support.harness import children

ENOUGH = 0.6
"""Seconds for which a CRIU is continued in these tests."""


@pytest.fixture
def life(lives: Callable[[int], Life], monkeypatch: pytest.MonkeyPatch) -> Life:
    monkeypatch.setattr(criu_watchdog, "STOPPED_SECONDS", ENOUGH)
    made = lives(USER)
    made.start(COUNTER)
    made.counts_on()
    return made


def theirs(name: bytes) -> list[int]:
    """Processes of the user below this one, by the name of what they execute."""
    found = []
    for pid in children(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            named = (Path("/proc") / str(pid) / "comm").read_bytes().strip() == name
            if named and procfs.status(pid).uids[0] == USER:
                found.append(pid)
    return found


@contextlib.contextmanager
def stopping(name: bytes) -> Iterator[None]:
    """Stop whatever has this name, and as soon as it is continued again."""
    over = threading.Event()

    def stop() -> None:
        while not over.wait(0.002):
            for pid in theirs(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)

    beside = threading.Thread(target=stop)
    beside.start()
    try:
        # At once is what this thread cannot be sure of on a busy machine.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(criu_watchdog, "signal", SimpleNamespace(SIGCONT=0))
            yield
    finally:
        over.set()
        beside.join()


def stop_when_frozen(monkeypatch: pytest.MonkeyPatch, name: bytes = b"criu") -> list[int]:
    """Stop whatever has this name while the tree is frozen; its pids, as soon as they are known."""
    note = Dump._note
    stopped: list[int] = []

    def stop(self: Dump) -> None:
        for pid in theirs(name):
            # A child of the script may have ended meanwhile.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
        note(self)

    monkeypatch.setattr(Dump, "_note", stop)
    return stopped


@pytest.mark.parametrize("name", [b"criu", b"meet.sh"])
def test_a_criu_that_is_stopped_once_goes_on(
    life: Life, name: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does its action script, which CRIU waits for."""
    stopped = stop_when_frozen(monkeypatch, name)
    life.dump()
    assert stopped
    life.counts_on()


def test_a_dump_that_is_stopped_again_and_again_ends(life: Life) -> None:
    began = time.monotonic()
    with stopping(b"criu"), pytest.raises(Internal, match="dump was stopped again and again"):
        life.dump()
    assert time.monotonic() - began < 20
    assert not theirs(b"criu")


def test_a_dump_that_is_stopped_when_it_has_begun_ends(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told to give up, and killed when it is not allowed to: the program is their own."""
    # As if it was stopped again at once.
    monkeypatch.setattr(criu_watchdog, "signal", SimpleNamespace(SIGCONT=0))
    stop_when_frozen(monkeypatch)
    began = time.monotonic()
    with pytest.raises(Internal, match="dump was stopped again and again"):
        life.dump()
    assert time.monotonic() - began < 20
    assert not theirs(b"criu")


def test_a_restore_that_is_stopped_again_and_again_ends(life: Life) -> None:
    life.dump()
    life.kill()
    began = time.monotonic()
    with stopping(b"criu"), pytest.raises(Internal, match="restore was stopped again and again"):
        life.restore()
    assert time.monotonic() - began < 20
    wait_for(lambda: procfs.stat(life.pid) is None)
    life.restore()
    life.counts_on()


def test_a_criu_that_does_nothing_is_killed_after_its_deadline(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the program's cgroup were frozen: CRIU waits for a thread that does not run."""
    monkeypatch.setattr(criu_watchdog.CriuWatchdog, "_continue", lambda *_: None)
    monkeypatch.setattr("phosd.engine.criu.run.running.IDLE_SECONDS", ENOUGH)
    stop_when_frozen(monkeypatch)
    began = time.monotonic()
    with pytest.raises(Timeout, match="did not finish within"):
        life.dump(deadline=1.0)
    assert time.monotonic() - began < 20
    assert not theirs(b"criu")
