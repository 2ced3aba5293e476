"""Looking at processes of which some hold up whoever looks."""

import itertools
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from phosd.engine.program import process
from phosd.engine.system import procfs, unkillable_reads
from phosd.engine.system.unkillable_reads import AbandonableThreads

PIDS = list(range(100, 110))


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The user of each process; 1000 if it is not given."""
    monkeypatch.setattr(unkillable_reads, "TIMEOUT", 0.1)
    monkeypatch.setattr(unkillable_reads, "_BY_USER", 0.2)
    owners: dict[int, int] = {}
    monkeypatch.setattr(unkillable_reads, "owner", lambda pid: owners.get(pid, 1000))
    monkeypatch.setattr(procfs, "process_id", lambda pid: procfs.ProcessId(pid, 1))
    return owners


@pytest.fixture
def go() -> Iterator[threading.Event]:
    go = threading.Event()
    yield go
    go.set()


def test_all_are_seen_in_order(owners: dict[int, int]) -> None:
    assert list(AbandonableThreads().each(PIDS, lambda pid: pid * 2)) == [
        (pid, 2 * pid) for pid in PIDS
    ]
    assert list(AbandonableThreads().each([], lambda pid: pid)) == []


def test_errors_are_the_callers(owners: dict[int, int]) -> None:
    seen = []

    def look(pid: int) -> int:
        if pid == 103:
            raise ZeroDivisionError
        return pid

    with pytest.raises(ZeroDivisionError):
        for pid, _ in AbandonableThreads().each(PIDS, look):
            seen.append(pid)
    assert seen == [100, 101, 102]


def test_one_that_holds_a_look_up_is_left_out(owners: dict[int, int], go: threading.Event) -> None:
    """It is not looked at again before that look has ended, and then is."""
    threads, looks = AbandonableThreads(), []

    def look(pid: int) -> int:
        looks.append(pid)
        if pid == 103:
            go.wait(60)
        return pid

    others = [pid for pid in PIDS if pid != 103]
    for _ in range(3):
        assert [pid for pid, _ in threads.each(PIDS, look)] == others
    assert looks.count(103) == 1
    go.set()
    end = time.monotonic() + 30
    while [pid for pid, _ in threads.each(PIDS, look)] != PIDS:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_user_costs_little_time_however_many_hold_looks_up(
    owners: dict[int, int], go: threading.Event
) -> None:
    threads = AbandonableThreads()
    bad = set(PIDS[1:8])
    owners |= dict.fromkeys(bad, 2000) | {PIDS[8]: 2000}
    began = time.monotonic()
    seen = [pid for pid, _ in threads.each(PIDS, lambda pid: pid not in bad or go.wait(60))]
    assert seen == [PIDS[0], PIDS[9]], "that user's others are not looked at either"
    assert time.monotonic() - began < 0.1 * 7


def test_a_user_costs_little_time_however_many_are_slow(
    owners: dict[int, int],
) -> None:
    """Each answers in time, if only just."""
    owners |= dict.fromkeys(PIDS[1:9], 2000)
    looks = []

    def look(pid: int) -> None:
        looks.append(pid)
        if owners.get(pid) == 2000:
            time.sleep(0.06)

    seen = [pid for pid, _ in AbandonableThreads().each(PIDS, look)]
    assert seen[0] == PIDS[0] and seen[-1] == PIDS[9]
    assert 4 <= len(seen) <= 6


def test_the_others_are_left_out_when_the_time_is_over(
    owners: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is nobody's fault: all are looked at the next time."""
    monkeypatch.setattr(unkillable_reads, "TIMEOUT", 30.0)
    threads = AbandonableThreads()
    owners |= {pid: 2000 + pid for pid in PIDS}

    def look(pid: int) -> None:
        time.sleep(0 if pid == PIDS[0] else 0.3)

    seen = [pid for pid, _ in threads.each(PIDS, look, 1.0)]
    assert seen == PIDS[: len(seen)] and 1 <= len(seen) <= 4
    assert [pid for pid, _ in threads.each(PIDS, lambda pid: pid)] == PIDS


def test_one_user_never_costs_all_the_time_of_a_list() -> None:
    """Not even with looks of which each ends just in time, so that nobody is held."""
    assert unkillable_reads._BY_USER + unkillable_reads.TIMEOUT < process._LIST_SECONDS - 2


def test_whoever_ends_after_a_look_is_charged_for_it(owners: dict[int, int]) -> None:
    threads = AbandonableThreads()
    owners |= dict.fromkeys(PIDS[:9], 2000)

    def look(pid: int) -> None:
        if pid in PIDS[:9]:
            time.sleep(0.06)
            owners[pid] = -1

    seen = [pid for pid, _ in threads.each(PIDS, look)]
    assert seen[-1] == PIDS[9] and len(seen) <= 6


def test_a_fair_order_begins_with_those_who_have_few(owners: dict[int, int]) -> None:
    owners |= dict.fromkeys(PIDS[:5], 0) | dict.fromkeys(PIDS[5:8], 2000)
    orders = {tuple(unkillable_reads.fairly(PIDS)) for _ in range(50)}
    assert all({*order[:5]} == {*PIDS[:5]} and {*order} == {*PIDS} for order in orders), "root's"
    assert all({*order[5:7]} == {*PIDS[8:]} for order in orders), "then those of who has few"
    assert len({order[7] for order in orders}) > 1, "of a crowd, each time others are first"


def test_who_does_it_again_and_again_is_looked_at_ever_less(
    owners: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, looks = AbandonableThreads(), []
    now = time.monotonic()
    monkeypatch.setattr(unkillable_reads, "time", SimpleNamespace(monotonic=lambda: now))

    given_up = threading.Event()

    def slow(pid: int) -> None:
        looks.append(now)
        given_up.wait(60)

    for _ in range(60):
        given_up.clear()
        list(threads.each([100], slow))
        given_up.set()
        while any(why.thread.is_alive() for why in threads._held.values()):
            time.sleep(0.01)
        now += 0.5
    rests = [round(later - sooner) for sooner, later in itertools.pairwise(looks)]
    assert rests == [1, 2, 4, 8]
