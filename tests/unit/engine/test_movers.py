"""The movers of a node: who is kept, who is started again, and what stands by."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.digest import DigestKey
from phosd.engine.mover.client.mover import Mover
from phosd.engine.mover.client.standby import Standby
from phosd.engine.node.claims import Claims
from phosd.engine.node.movers import Movers
from phosd.errors import Internal
from tests.support.harness import wait_until

KEY = DigestKey(b"a secret of the test, long enough")


class Fake:
    """A mover, or a process that stands by, that lives until it is told otherwise, and counts how
    often it is closed, or released and ended.
    """

    def __init__(self) -> None:
        self.alive = True
        self.closed = self.ended = 0
        self.child = object()

    def close(self) -> None:
        self.closed += 1

    release = close

    def end(self) -> None:
        self.ended += 1

    def keep_room(self) -> None:
        pass


@pytest.fixture
def claims() -> Claims:
    return Claims()


@pytest.fixture
def table(tmp_path: Path, claims: Claims) -> Iterator[Movers]:
    made = Movers(tmp_path, None, KEY, claims, set)
    yield made
    made.close()


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The processes that movers are made of, in order."""
    found: list[object] = []

    def start(*arguments: object) -> Any:
        found.append(arguments[-1])
        return Fake()

    monkeypatch.setattr(Mover, "start", start)
    return found


@pytest.fixture
def standbys(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was started to stand by, in order."""
    found: list[Any] = []

    def start(*_: object) -> Any:
        found.append(Fake())
        return found[-1]

    monkeypatch.setattr(Standby, "start", start)
    return found


def count(found: list[Any]) -> Callable[[int], object]:
    return lambda number: wait_until(lambda: len(found) == number, f"{number} standbys")


def test_a_dead_one_is_closed_once_though_the_next_does_not_start(
    table: Movers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its descriptors may be others' by then."""
    first: Any = Fake()
    second: Any = Fake()
    starts: list[Any] = [first, Internal("it was killed", hint="try again"), second]

    def start(*_: object) -> Any:
        found = starts.pop(0)
        if isinstance(found, Internal):
            raise found
        return found

    monkeypatch.setattr(Mover, "start", start)
    assert [table.mover(0)] == [first]
    first.alive = False
    with pytest.raises(Internal, match="it was killed"):
        table.mover(0)
    assert [table.mover(0)] == [second]
    table.close()
    assert (first.closed, second.closed) == (1, 1)


def test_movers_of_several_gpus_start_at_once(
    table: Movers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever needs one waits for the start that has begun, and is told why it failed."""
    together = threading.Barrier(2, timeout=60)
    end = threading.Event()

    def start(gpu: int, *_: object) -> Any:
        together.wait()
        end.wait(60)
        if gpu:
            raise Internal("it was killed", hint="try again")
        return Fake()

    monkeypatch.setattr(Mover, "start", start)
    table.begin([0, 1])
    assert table.running([0, 1]) == []
    threading.Timer(0.01, end.set).start()
    with pytest.raises(Internal, match="it was killed"):
        table.mover(1)
    first = table.mover(0)
    assert table.running([0, 1]) == [first]


def test_what_stands_by_becomes_the_mover_and_is_replaced_after_the_job(
    table: Movers, claims: Claims, children: list[object], standbys: list[Any]
) -> None:
    """Nothing is started beside a job, which may have stopped its program."""
    wait = count(standbys)
    with claims.claim([1]):
        table.keep_standbys([0, 1])
        assert not standbys
    wait(2)
    with claims.claim([2]):
        table.mover(0)
        taken = next(each for each in standbys if each.closed)
        assert children == [taken.child]
        with claims.claim([3]):
            pass
        assert len(standbys) == 2
        table.leave([0], [2])
    wait(3)
    table.close()
    assert [each.ended for each in standbys if each is not taken] == [1, 1]
    assert taken.ended == 0
    assert table.mover(0).alive, "a node may be used again"


def test_one_that_has_ended_is_not_taken(
    table: Movers, claims: Claims, children: list[object], standbys: list[Any]
) -> None:
    wait = count(standbys)
    table.keep_standbys([0])
    wait(1)
    standbys[0].alive = False
    table.mover(0)
    assert children == [None]
    assert standbys[0].closed == 1


def test_one_that_has_ended_is_replaced(table: Movers, claims: Claims, standbys: list[Any]) -> None:
    wait = count(standbys)
    table.keep_standbys([0])
    wait(1)
    with claims.claim([1]):
        standbys[0].alive = False
    wait(2)
    assert standbys[0].closed == 1


def test_a_failure_to_stand_by_is_no_failure_of_the_mover(
    table: Movers, children: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object) -> Any:
        raise Internal("it was killed", hint="try again")

    monkeypatch.setattr(Standby, "start", start)
    table.keep_standbys([0])
    table.mover(0)
    assert children == [None]
