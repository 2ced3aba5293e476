"""Several dumps at once: only one thread of each program runs while phosd does its work."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from phosd.engine.criu.dump.dump import DumpOptions
from phosd.engine.criu.dump.dumps import CpuParts, DriverWork
from phosd.engine.criu.run.owned_processes import is_criu
from phosd.engine.criu.run.program import Criu
from phosd.engine.image.store import Store
from phosd.engine.job.cancellation import Cancellation
from phosd.engine.program import tree
from phosd.engine.system import procfs
from phosd.errors import Cancelled, Internal, PhosError
from tests.node.criu.life import COUNTER, USER, Life, wait_for

Starter = Callable[[], Life]

THREADS = (
    """
import threading
for _ in range(3):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
    + COUNTER
)

FILTERED = """
import ctypes, os, struct, time
LOAD, EQUAL, RETURN, ALLOW, REFUSE, GETPRIORITY = 0x20, 0x15, 0x06, 0x7fff0000, 0x50001, 140
lines = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, GETPRIORITY), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code))) == 0
value = 0
while True:
    try:
        os.getpriority(os.PRIO_PROCESS, 0)
        print(-1, flush=True)
    except PermissionError:
        value += 1
        print(value, flush=True)
    time.sleep(0.005)
"""


@pytest.fixture
def pair(lives: Callable[[int], Life]) -> list[Life]:
    """A program of root and one of a user."""
    made = [lives(0), lives(USER)]
    for life in made:
        life.start(THREADS)
        life.counts_on()
    return made


@contextlib.contextmanager
def dumps(criu: Criu, folder: Path, lives: list[Life]) -> Iterator[CpuParts]:
    """Dumps of the programs, about to begin."""
    folder.mkdir(mode=0o700)
    pids = frozenset(life.pid for life in lives)
    options = DumpOptions(checkpointed=pids, held=True)
    with Store(folder).begin(0) as writer, CpuParts(criu, writer, None, options) as parts:
        parts.prepare([tree.scan(life.pid) for life in lives])
        yield parts


def one_runs(runs: Mapping[int, int]) -> bool:
    """Whether all threads of the processes are held but for one of each."""
    found = {thread: procfs.stat(thread) for pid in runs for thread in procfs.threads(pid)}
    free = {thread for thread, stat in found.items() if stat and stat.state != "t"}
    return free == set(runs.values())


def last_threads(lives: list[Life]) -> dict[int, int]:
    return {life.pid: procfs.threads(life.pid)[-1] for life in lives}


def test_all_are_held_at_once(criu: Criu, pair: list[Life], tmp_path: Path) -> None:
    runs, seen = last_threads(pair), []
    work = DriverWork(
        lambda: runs, lambda: seen.append(one_runs(runs)), lambda: seen.append(one_runs(runs))
    )
    with dumps(criu, tmp_path / "state", pair) as parts:
        parts.dump_around(work, Cancellation())
        assert seen == [True, True]
        assert [dumped.root.pid for dumped in parts.trees] == [life.pid for life in pair]
        for life in pair:
            life.counts_on()
            assert not procfs.tracer(life.pid)


@pytest.mark.parametrize("how", ["raises", "cancelled", "killed", "names no thread"])
def test_one_fails(how: str, criu: Criu, pair: list[Life], tmp_path: Path) -> None:
    """All go on; the last step was taken in any case."""
    runs, brought_back = last_threads(pair), []
    job = Cancellation()
    if how == "names no thread":
        runs[pair[1].pid] = os.getpid()

    def fail() -> None:
        if how == "raises":
            raise Internal("the driver does not want to", hint="a test did that")
        if how == "cancelled":
            job.cancel()
        if how == "killed":
            tracer = procfs.status(pair[1].pid).tracer
            assert is_criu(tracer)
            os.kill(tracer, signal.SIGKILL)
            wait_for(lambda: not procfs.tracer(pair[1].pid))

    def bring_back() -> None:
        first = {pair[0].pid: runs[pair[0].pid]}
        brought_back.append(one_runs(first))

    expected: type[PhosError] = Cancelled if how == "cancelled" else Internal
    with dumps(criu, tmp_path / "state", pair) as parts:
        with pytest.raises(expected):
            parts.dump_around(DriverWork(lambda: runs, fail, bring_back), job)
        assert brought_back == [True], "the first was not held any more"
    for life in pair:
        assert not procfs.tracer(life.pid)
        life.counts_on()


def test_what_runs_is_under_its_filters(
    criu: Criu, lives: Callable[[int], Life], tmp_path: Path
) -> None:
    """CRIU suspends them for its own code; the program must not profit from that."""
    life = lives(0)
    life.start(FILTERED)
    life.counts_on()
    work = DriverWork(
        lambda: {life.pid: life.pid}, lambda: _counts_on(life), lambda: _counts_on(life)
    )
    with dumps(criu, tmp_path / "state", [life]) as parts:
        parts.dump_around(work, Cancellation())
    assert -1 not in life.counts_on()


def _counts_on(life: Life) -> None:
    life.counts_on()
