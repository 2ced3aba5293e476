"""What becomes of the processes of a GPU that is to be cleared."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phosd.engine.operations.evacuate import EvacuationOutcome, GpuCapacity, GpuUser, Step, plan
from phosd.engine.program.process import GpuProcess

GIB = 1 << 30
CONTEXT = GIB // 2


def user(pid: int, size: int = GIB, gpus: tuple[int, ...] = (0,), **changes: Any) -> GpuUser:
    values = {"hook_state": "hooked", "reason": "", "state": "running"} | changes
    return GpuUser(GpuProcess(pid, 1, 0, ("train",), gpus, size, **values), size)


def capacities(*free: int) -> list[GpuCapacity]:
    return [GpuCapacity(n, "GH100", size) for n, size in enumerate(free)]


def told(steps: list[Step]) -> list[tuple[int, EvacuationOutcome, int | None]]:
    return [(step.user.process.pid, step.outcome, step.to) for step in steps]


def test_the_largest_is_first_and_goes_where_there_is_most_room() -> None:
    steps = plan(0, [user(1), user(2, 3 * GIB)], capacities(0, 4 * GIB, 3 * GIB), CONTEXT)
    assert told(steps) == [(2, EvacuationOutcome.MIGRATE, 1), (1, EvacuationOutcome.MIGRATE, 2)]


def test_what_earlier_steps_take_counts_and_the_rest_is_suspended() -> None:
    steps = plan(0, [user(n) for n in (1, 2, 3)], capacities(0, 3 * GIB), CONTEXT)
    assert told(steps) == [
        (1, EvacuationOutcome.MIGRATE, 1),
        (2, EvacuationOutcome.MIGRATE, 1),
        (3, EvacuationOutcome.SUSPEND, None),
    ]
    assert "no other GPU of this chip has room" in steps[-1].why


@pytest.mark.parametrize(
    ("short", "outcome"), [(0, EvacuationOutcome.MIGRATE), (1, EvacuationOutcome.SUSPEND)]
)
def test_the_context_needs_room_too(short: int, outcome: EvacuationOutcome) -> None:
    (step,) = plan(0, [user(1)], capacities(0, GIB + CONTEXT - short), CONTEXT)
    assert step.outcome is outcome


def test_another_chip_is_no_place() -> None:
    (step,) = plan(
        0, [user(1)], [GpuCapacity(0, "GH100", 0), GpuCapacity(1, "AD102", 9 * GIB)], CONTEXT
    )
    assert (step.outcome, step.why) == (EvacuationOutcome.SUSPEND, "no other GPU is alike")


def test_two_gpus_of_a_process_do_not_become_one() -> None:
    (step,) = plan(0, [user(1, gpus=(0, 1))], capacities(0, 9 * GIB, 2 * GIB), CONTEXT)
    assert (step.outcome, step.to) == (EvacuationOutcome.MIGRATE, 2)


def test_a_container_gets_only_a_gpu_that_it_was_given() -> None:
    (step,) = plan(0, [user(1, unseen=frozenset({1}))], capacities(0, 9 * GIB, 2 * GIB), CONTEXT)
    assert (step.outcome, step.to) == (EvacuationOutcome.MIGRATE, 2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hook_state": "driver", "reason": "it was started without"}, "it was started without"),
        ({"hook_state": "driver"}, "it was not started with `phos run`"),
        ({"hook_state": "unsupported", "reason": "managed memory"}, "managed memory"),
        ({"state": "parked"}, "it is parked"),
        ({"state": "locked", "reason": "by whom?"}, "it is locked: by whom?"),
        ({"reason": "a job works on it"}, "a job works on it"),
    ],
)
def test_what_cannot_be_moved_stays_and_says_why(changes: dict[str, Any], why: str) -> None:
    (step,) = plan(0, [user(1, **changes)], capacities(0, 9 * GIB), CONTEXT)
    assert (step.outcome, step.why) == (EvacuationOutcome.STAY, why)


SIZES = st.integers(0, 8 * GIB)
TENANTS = st.lists(
    st.tuples(SIZES, st.sampled_from([(0,), (0, 1), (0, 2, 3)]), st.sampled_from(["", "no"])),
    max_size=12,
)
ROOMS = st.lists(st.tuples(st.sampled_from(["GH100", "AD102"]), SIZES), min_size=1, max_size=5)


@given(TENANTS, ROOMS, st.integers(0, GIB))
def test_no_gpu_is_overfilled_and_every_process_has_one_step(
    given_tenants: list[tuple[int, tuple[int, ...], str]],
    given_rooms: list[tuple[str, int]],
    context: int,
) -> None:
    there = [
        user(pid, size, gpus, reason=reason)
        for pid, (size, gpus, reason) in enumerate(given_tenants, 1)
    ]
    found = [GpuCapacity(n, chip, free) for n, (chip, free) in enumerate(given_rooms)]
    steps = plan(0, there, found, context)
    assert sorted(step.user.process.pid for step in steps) == [t.process.pid for t in there]
    assert plan(0, reversed(there), found, context) == steps
    taken: Counter[int] = Counter()
    for step in steps:
        gpus, movable = step.user.process.gpus, not step.user.process.reason
        assert (step.outcome is not EvacuationOutcome.STAY) is movable
        assert (step.to is not None) is (step.outcome is EvacuationOutcome.MIGRATE)
        others = {n for n, each in enumerate(found) if n and each.chip == found[0].chip}
        fits = {
            n for n in others - set(gpus) if found[n].free - taken[n] >= step.user.bytes + context
        }
        if step.to is not None:
            assert step.to in fits
            taken[step.to] += step.user.bytes + context
        elif movable:
            assert not fits
    assert all(taken[n] <= found[n].free for n in taken)
