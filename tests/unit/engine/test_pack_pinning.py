"""Packs are pinned beside the program, and not while it is stopped."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, cast

import pytest

from phosd.engine.image.writer import Pack
from phosd.engine.job.progress import Progress
from phosd.engine.memory.pack_pinning import PackPinning
from phosd.engine.mover.client.mover import Mover
from phosd.errors import Cancelled, Internal

PACKS = [Pack(number, number) for number in range(18)]


class FakeMover:
    """Pins as many parts as it may."""

    alive = True

    def __init__(self) -> None:
        self.may = threading.Semaphore(0)
        self.begun: list[list[int]] = []
        self.pinned: list[int] = []
        self.kept: list[int] = []
        self.error: Internal | None = None

    def pin(self, packs: Iterable[int]) -> int:
        self.begun.append(list(packs))
        assert self.may.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        number = len(self.begun)
        self.pinned.append(number)
        return number

    def unpin(self, number: int, *, keep: bool) -> None:
        self.pinned.remove(number)
        if keep:
            self.kept.append(number)


@pytest.fixture
def mover() -> Iterator[FakeMover]:
    mover = FakeMover()
    yield mover
    for _ in PACKS:
        mover.may.release()


def begun(mover: FakeMover) -> PackPinning:
    return PackPinning(cast(Any, mover), PACKS)


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_all_packs_are_pinned_once_and_unpinned_at_the_end(mover: FakeMover) -> None:
    pinning = begun(mover)
    for _ in PACKS:
        mover.may.release()
    pinning.wait(Progress())
    assert [*chain(*mover.begun)] == list(range(18)) and len(mover.pinned) == len(mover.begun)
    pinning.end()
    assert mover.pinned == []


def test_nothing_is_pinned_while_the_program_is_stopped(mover: FakeMover) -> None:
    pinning = begun(mover)
    until(lambda: len(mover.begun) == 1)
    resting = threading.Thread(target=pinning.rest)
    resting.start()
    until(lambda: not pinning._going.is_set())
    time.sleep(0.05)
    assert resting.is_alive(), "the stop begins when nothing is on its way any more"
    for _ in PACKS:
        mover.may.release()
    resting.join(30)
    time.sleep(0.1)
    assert len(mover.begun) == 1 and mover.pinned == [1]
    pinning.go_on()
    pinning.wait(Progress())
    assert [*chain(*mover.begun)] == list(range(18))
    pinning.end()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_job_that_ends_early_pins_no_more(stopped: bool, mover: FakeMover) -> None:
    pinning = begun(mover)
    until(lambda: len(mover.begun) == 1)
    if stopped:
        for _ in PACKS:
            mover.may.release()
        pinning.rest()
    known = len(mover.begun)
    ending = threading.Thread(target=pinning.end)
    ending.start()
    until(lambda: pinning._over)
    mover.may.release()
    ending.join(30)
    assert not ending.is_alive() and mover.pinned == []
    assert len(mover.begun) <= known + 1


def test_who_waits_can_be_cancelled(mover: FakeMover) -> None:
    pinning = begun(mover)
    progress = Progress()
    progress.cancel()
    with pytest.raises(Cancelled):
        pinning.wait(progress)
    for _ in PACKS:
        mover.may.release()
    pinning.end()


def test_a_mover_that_cannot_pin(mover: FakeMover, caplog: pytest.LogCaptureFixture) -> None:
    """A step that needs it fails; others write through the file system, and the log says so."""
    mover.error = Internal("it is gone")
    pinning = begun(mover)
    mover.may.release()
    with pytest.raises(Internal, match="it is gone"):
        pinning.wait(Progress())
    pinning.end()
    assert "could not be pinned" in caplog.text


def test_no_packs_at_all() -> None:
    pinning = PackPinning(cast(Mover, FakeMover()), [])
    pinning.wait(Progress())
    pinning.end()
