"""Where processes go: what people write, and what the driver is told."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phosd.engine.node.gpus import GpuInfo
from phosd.engine.node.placement import find, parse_moves, whole
from phosd.errors import InvalidOption


def gpus(count: int) -> list[GpuInfo]:
    return [GpuInfo(n, f"GPU-{n:02x}-{'f' * 8}", "A GPU", 1 << 30) for n in range(count)]


@st.composite
def moved(draw: st.DrawFn) -> tuple[int, dict[int, int]]:
    """A node's number of GPUs, and a new GPU for each of those that a program uses."""
    count = draw(st.integers(1, 8))
    used = draw(st.lists(st.integers(0, count - 1), unique=True, min_size=1))
    new = draw(st.permutations(range(count)))
    return count, dict(zip(used, new, strict=False))


@given(moved())
def test_the_driver_is_told_of_every_gpu_once(case: tuple[int, dict[int, int]]) -> None:
    count, moves = case
    to = whole(moves, count)
    assert sorted(to) == list(range(count))
    assert {old: to[old] for old in moves} == moves
    away = {*moves} | {*moves.values()}
    assert all(to[gpu] == gpu for gpu in range(count) if gpu not in away)


@given(moved(), st.booleans())
def test_what_is_written_is_what_is_meant(case: tuple[int, dict[int, int]], by_uuid: bool) -> None:
    count, wanted = case
    known = gpus(count)
    name = {gpu.ordinal: gpu.uuid[:6] if by_uuid else str(gpu.ordinal) for gpu in known}
    text = ", ".join(f"{name[old]}:{name[new]}" for old, new in wanted.items())
    away = {old: new for old, new in wanted.items() if old != new}
    if away:
        assert parse_moves(text, [*wanted], known) == away
    else:
        with pytest.raises(InvalidOption, match="already"):
            parse_moves(text, [*wanted], known)


@given(st.text(max_size=30), st.sets(st.integers(0, 3), max_size=4))
def test_nonsense_is_refused_or_keeps_the_rules(text: str, used: set[int]) -> None:
    try:
        moves = parse_moves(text, sorted(used), gpus(4))
    except InvalidOption as error:
        assert error.hint
        return
    assert moves and {*moves} <= used
    after = [moves.get(gpu, gpu) for gpu in used]
    assert len({*after}) == len(after) and {*after} <= {*range(4)}


def test_a_beginning_that_fits_several() -> None:
    with pytest.raises(InvalidOption, match="several GPUs"):
        find("GPU-0", gpus(3))
    assert find("GPU-02", gpus(3)) == 2
