"""Copying in passes: when it goes on, and when it ends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import pytest

from phosd.engine.hook_client.link import HookLink
from phosd.engine.image.manifest import CHUNK
from phosd.engine.job.progress import Progress
from phosd.engine.memory.device_memory import DeviceMemory
from phosd.engine.memory.precopy_rounds import PASSES, Missing, copy_while_running
from phosd.errors import Cancelled


class FakeMemory:
    """Looks at the programs, and keeps what they free while a pass runs."""

    def __init__(self) -> None:
        self.looks = 0
        self.keeps = False

    def take(self, _: Sequence[HookLink]) -> None:
        assert not self.keeps
        self.looks += 1

    @contextmanager
    def drops_put_off(self) -> Iterator[None]:
        self.keeps = True
        yield
        self.keeps = False


def copied(left: Sequence[int], progress: Progress) -> list[int]:
    """How many chunks each pass copied of a program of which ``left`` differ at each look."""
    memory, done = FakeMemory(), list[int]()
    differing = iter(left)

    def missing() -> Missing[int]:
        assert memory.keeps, "what is compared could be freed meanwhile"
        return {0: range(next(differing))}

    def copy(found: Missing[int], _: Progress) -> None:
        assert memory.keeps, "what is copied could be freed meanwhile"
        done.append(len(found[0]))

    copy_while_running(cast(DeviceMemory, memory), [], progress, missing, copy)
    assert memory.looks == len(left) - len(list(differing))
    return done


def test_it_goes_on_while_less_is_left_each_time() -> None:
    progress = Progress()
    assert copied([1000, 500, 200, 64, 9], progress) == [1000, 500, 200]
    assert progress.figures.measured() == {"passes": 3, "bytes_left": 64 * CHUNK}


def test_it_ends_when_a_pass_gains_too_little() -> None:
    progress = Progress()
    assert copied([1000, 710, 9], progress) == [1000]
    assert progress.figures.measured() == {"passes": 1, "bytes_left": 710 * CHUNK}
    assert copied([1000, 690, 600, 9], Progress()) == [1000, 690]


def test_it_ends_after_so_many_passes() -> None:
    left = [round(100_000 * 0.69**n) for n in range(PASSES + 3)]
    assert copied(left, Progress()) == left[:PASSES]


def test_little_is_not_worth_a_pass() -> None:
    assert copied([64], Progress()) == []
    assert copied([65, 0], Progress()) == [65]


def test_each_pass_is_a_phase_with_its_bytes() -> None:
    progress = Progress()
    copied([1000, 500, 1], progress)
    shown = [(p.name, p.bytes_total, p.stopped, p.end is not None) for p in progress.phases]
    wanted = [1000 * CHUNK, 500 * CHUNK]
    assert shown == [("precopy", size, False, True) for size in wanted]


def test_it_can_be_cancelled_between_passes() -> None:
    progress = Progress()
    progress.cancel()
    with pytest.raises(Cancelled):
        copied([1000, 500], progress)
