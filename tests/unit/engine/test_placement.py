"""Where processes go: what people write, and what the driver is told."""

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phosd.engine.image.manifest import Gpu, HostGpu, Manifest
from phosd.engine.node import image_placement, placement
from phosd.engine.node.expected_memory import ExpectedMemory
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.node.image_placement import ImagePlacement, place_image
from phosd.engine.node.placement import find, parse_moves, parse_pairs, whole
from phosd.engine.operations.restore import image_gpus
from phosd.engine.operations.restore.image_gpus import place, placed_image
from phosd.errors import GpuMismatch, InvalidOption, OutOfMemory, PhosError, Unsupported
from tests.support.fake_engine import manifest


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


def test_both_ways_to_write_a_pair() -> None:
    assert parse_pairs("0=1,1:0", [0, 1], gpus(2)) == {0: 1, 1: 0}


# -- the GPUs of an image ----------------------------------------------------------------------

OLD = [f"GPU-old-{n}" for n in range(4)]


def image(saw: list[int], used: list[int], known: int = 4, chip: str = "A GPU") -> Manifest:
    """An image of a program that saw some of a machine's GPUs; an older one knows none others."""
    made = manifest("20260102T030405-0000")
    seen = tuple(Gpu(n, OLD[n], chip, 1 << 30, used=n in used) for n in saw)
    host = msgspec.structs.replace(
        made.host, gpus=tuple(HostGpu(uuid, chip) for uuid in OLD[:known])
    )
    return msgspec.structs.replace(made, gpus=seen, host=host)


def machine(*uuids: str, chip: str = "A GPU") -> list[GpuInfo]:
    return [GpuInfo(n, uuid, chip, 1 << 30) for n, uuid in enumerate(uuids)]


def placed(
    saved: Manifest, here: list[GpuInfo], wanted: str = "", free: tuple[int, ...] = (9,) * 5
) -> ImagePlacement:
    needs = {gpu.ordinal: 5 for gpu in saved.gpus if gpu.used}
    return place_image(saved, wanted, needs, here, lambda gpu: free[gpu.ordinal])


def test_where_an_image_goes_by_default() -> None:
    """To its GPUs, however they are numbered now; from one that is full or gone to one with room,
    the emptiest; and what was only seen is any other.
    """
    saved = image([0, 1], [0])
    same = machine(*OLD)
    assert placed(saved, same) == ImagePlacement({0: 0, 1: 1}, (), "GPU 0", changed=False)
    turned = placed(saved, machine(*reversed(OLD)))
    assert turned.moves == {0: 3, 1: 2} and (turned.text, turned.changed) == ("GPU 3", False)
    assert turned.pairs == tuple(zip(OLD, OLD, strict=True))  # told, as the order is another
    full = placed(saved, same, free=(1, 9, 7, 9))
    assert (full.moves, full.text) == ({0: 1, 1: 0}, "GPU 1 in place of GPU 0") and full.changed
    assert dict(full.pairs) == {OLD[0]: OLD[1], OLD[1]: OLD[0], OLD[2]: OLD[2], OLD[3]: OLD[3]}
    here = machine("GPU-new-0", "GPU-new-1", OLD[1], "GPU-new-3", "GPU-new-4")
    away = placed(saved, here, free=(6, 7, 0, 0, 0))
    assert away.moves == {0: 1, 1: 2}
    assert away.pairs == (  # also for those that the program did not see, and no others
        (OLD[0], "GPU-new-1"), (OLD[1], OLD[1]), (OLD[2], "GPU-new-0"), (OLD[3], "GPU-new-3"),
    )  # fmt: skip
    more = placed(image([0], [0], known=1), machine("GPU-new-0", "GPU-new-1"))
    assert (more.moves, more.pairs) == ({0: 0}, ((OLD[0], "GPU-new-0"),))
    both = placed(image([0, 1], [0, 1], known=2), machine("GPU-new-0", "GPU-new-1", *OLD[:1]))
    assert both.moves == {0: 2, 1: 0}  # never two onto one


def test_an_older_image_knows_only_what_its_program_saw() -> None:
    older = image([1], [1], known=0)
    assert placed(older, machine(*OLD)).pairs == ()
    moved = placed(older, machine(*OLD), "2")
    assert moved.moves == {1: 2}
    assert dict(moved.pairs) == {OLD[0]: OLD[0], OLD[1]: OLD[2], OLD[2]: OLD[1], OLD[3]: OLD[3]}


@pytest.mark.parametrize(
    ("wanted", "moves"),
    [("3", {0: 3, 1: 1}), ("0:1", {0: 1, 1: 0}), ("GPU-old-0:GPU-old-2", {0: 2, 1: 1})],
)
def test_where_an_image_is_wanted(wanted: str, moves: dict[int, int]) -> None:
    there = placed(image([0, 1], [0]), machine(*OLD), wanted)
    assert there.moves == moves and {old for old, _ in there.pairs} == {*OLD}
    assert len({new for _, new in there.pairs}) == len(OLD)


@pytest.mark.parametrize(
    ("saved", "here", "wanted", "free", "error", "why"),
    [
        (image([0], [0]), machine("a", chip="B"), "", 9, GpuMismatch, r"a GPU A GPU .* is 0 B"),
        (image([0], [0]), [], "", 9, GpuMismatch, "here are none"),
        (image([0, 1], [0, 1]), machine("a"), "", 9, GpuMismatch, "needs 2 GPUs A GPU"),
        (image([0, 1], [0]), machine("a"), "", 9, GpuMismatch, "needs 2 GPUs A GPU"),
        (image([0], [0], known=2), machine("a"), "", 9, GpuMismatch, "2 GPUs, here is 1, and the"),
        (image([0], [0]), machine("a", "b"), "", 4, OutOfMemory, "GPU 0 has .*, GPU 1 has .*"),
        (image([0], [0]), machine("a", "b"), "1", 4, OutOfMemory, "^GPU 1 has .* in place of"),
        (image([0], [0]), machine("a", chip="B"), "0", 9, GpuMismatch, "a A GPU, GPU 0 here a B"),
        (image([0], [0]), machine("a"), "1", 9, InvalidOption, "no GPU of this node"),
        (image([0], [0]), machine("a"), "2:0", 9, InvalidOption, "no GPU of the program of image"),
        (image([0, 1], [0]), machine("a", "b"), "1:0", 9, InvalidOption, "does not use GPU 1"),
        (image([0, 1], [0, 1]), machine("a", "b"), "0:1,1:1", 9, InvalidOption, "would be GPU 1"),
        (image([0, 1], [0, 1]), machine("a", "b"), "1", 9, InvalidOption, "does not say where"),
    ],
)
def test_gpus_that_will_not_do(
    saved: Manifest,
    here: list[GpuInfo],
    wanted: str,
    free: int,
    error: type[PhosError],
    why: str,
) -> None:
    with pytest.raises(error, match=why) as raised:
        placed(saved, here, wanted, (free,) * 4)
    assert raised.value.hint


def test_a_divided_gpu_is_only_for_whom_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (image_placement, placement):
        monkeypatch.setattr(module, "divided", lambda n: "" if n else "is in MIG mode")
    saved = image([0], [0], known=1)
    assert placed(saved, machine(*OLD)).moves == {0: 0}
    assert placed(saved, machine("a", "b")).moves == {0: 1}
    with pytest.raises(Unsupported, match="MIG"):
        placed(saved, machine("a", "b"), "0")
    with pytest.raises(GpuMismatch, match="GPU 0 is in MIG mode"):
        placed(saved, machine("a"))


def test_what_others_are_about_to_take_is_left_to_them() -> None:
    expected = ExpectedMemory()
    free = {0: 10, 1: 8}
    with expected.expect({0: 4}, free.__getitem__):
        assert [expected.left(gpu, free[gpu]) for gpu in free] == [6, 8]
        free[0] = 7  # some of it has been taken by now
        assert expected.left(0, 7) == 6
        with expected.expect({0: 5, 1: 1}, free.__getitem__):
            assert [expected.left(gpu, free[gpu]) for gpu in free] == [1, 7]
            free[0] = 0
            assert expected.left(0, 0) == 0
    free[0] = 10
    assert [expected.left(gpu, free[gpu]) for gpu in free] == [10, 8]


def test_two_images_at_once_go_to_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing is taken yet. A third goes where there is room as long as they take none."""
    node: Any = SimpleNamespace(
        kept_memory=SimpleNamespace(let_go_of_the_dead=lambda: None),
        movers=SimpleNamespace(running=lambda gpus: []),
        expected_memory=ExpectedMemory(),
    )
    here = [GpuInfo(n, f"GPU-new-{n}", "A GPU", 10) for n in range(2)]
    monkeypatch.setattr(image_gpus, "list_gpus", lambda: here)
    saved = image([0], [0], known=2)
    saved = msgspec.structs.replace(
        saved, gpus=tuple(msgspec.structs.replace(gpu, needs=6) for gpu in saved.gpus)
    )
    with ExitStack() as restores:
        found = [restores.enter_context(placed_image(node, saved, "")).moves for _ in range(3)]
    assert found == [{0: 0}, {0: 1}, {0: 0}]
    assert place(node, saved, "").moves == {0: 0}
