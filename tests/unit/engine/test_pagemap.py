"""How saved pages are divided, page by page, and what of lists that a user wrote is believed."""

import mmap
import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from phosd.engine.criu.images import pagemap
from phosd.engine.criu.images.image_file import Field, ImageFile, message
from phosd.engine.criu.images.pagemap import LEAST_RUN, Area, Pagemap, Run, areas, packed, relatives
from phosd.errors import ImageCorrupt, Internal, PhosError, Unsupported
from tests.support.criu_images import ImageFile as Tree
from tests.support.criu_images import mutate

PAGE = mmap.PAGESIZE
MAGIC = bytes.fromhex("1943565424105656")
START = 0x7F0000000000
READ, BOTH = mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE
ANONYMOUS, PRIVATE, SHARED = 0x20, 0x02, 0x01
OF_NOBODY = 0x201
"""The status of private anonymous memory."""
GUARD = OF_NOBODY | 0x10000


def written(path: Path, *messages: Mapping[int, int | bytes]) -> Path:
    """A CRIU file with these messages."""
    encoded = (message(Field.of(*each) for each in entry.items()) for entry in messages)
    path.touch()
    ImageFile(MAGIC, tuple(encoded)).write(path)
    return path


def listed(path: Path, *runs: Mapping[int, int | bytes]) -> Path:
    return written(path, {1: 7}, *runs)


def run(address: int, count: int, flags: int = 4) -> dict[int, int | bytes]:
    return {1: address, 2: 0, 4: flags, 5: count}


def mapped(path: Path, *vmas: Mapping[int, int]) -> Path:
    """``mm.img`` with these mappings."""
    encoded = (Field.of(14, message(Field.of(*each) for each in vma.items())) for vma in vmas)
    path.touch()
    ImageFile(MAGIC, (message([Field.of(1, 0), *encoded]),)).write(path)
    return path


def vma(
    start: int, end: int, protection: int = BOTH, kind: int = 0x22, status: int = OF_NOBODY
) -> dict[int, int]:
    return {1: start, 2: end, 3: 0, 4: 0, 5: protection, 6: kind, 7: status, 8: 1}


def pages(runs: Sequence[Run]) -> dict[int, int]:
    """Where in a file each page is."""
    return {
        run.address + at: run.position + at for run in runs for at in range(0, run.length, PAGE)
    }


def read_by_criu(path: Path) -> dict[int, int]:
    """The same as CRIU finds it: a run is where all before it end."""
    found, position = {}, 0
    for entry in Tree.read(path).messages[1:]:
        values = {field.number: field.value for field in entry}
        address, count = values[1], values[5]
        assert isinstance(address, int) and isinstance(count, int)
        for _ in range(count):
            found[address] = position
            address, position = address + PAGE, position + PAGE
    return found


@pytest.mark.parametrize("seed", range(20))
def test_each_page_is_put_back_once_from_where_it_is(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    at, runs = START, []
    where: list[Area] = []
    for _ in range(200):
        at += PAGE * chance.choice((0, 0, 1, 5, 900))
        count = chance.choice((1, 2, 63, 64, 65, 256))
        runs.append(run(at, count))
        end = at + count * PAGE
        if chance.random() < 0.8:
            begin = where[-1].end if where and where[-1].end > at else at
            last = max(begin + PAGE, end - PAGE * chance.choice((0, 0, 0, 1)))
            where.append(Area(begin, last, True))
        at = end
    path = listed(tmp_path / "pagemap-1.img", *runs)
    before = read_by_criu(path)
    found = Pagemap.read(path)
    assert (found.pages, found.plain, found.byte_count) == (7, True, len(before) * PAGE)
    assert pages(found.runs) == before
    spared, kept = found.divided(where)
    assert pages([*spared, *kept]) == before
    assert len(spared) + len(kept) == len(runs)
    assert spared and kept
    for each in spared:
        assert each.length >= LEAST_RUN
        assert any(area.start <= each.address and each.end <= area.end for area in where)
    for each in kept:
        inside = any(area.start <= each.address and each.end <= area.end for area in where)
        assert each.length < LEAST_RUN or not inside
    rest = packed(kept)
    Pagemap(found.magic, 9, tuple(rest), plain=True).write(path)
    assert read_by_criu(path) == pages(rest)
    assert [each.length for each in rest] == [each.length for each in kept]
    assert Pagemap.read(path).pages == 9


@pytest.mark.parametrize(
    "runs",
    [
        [run(START + 1, 1)],
        [run(START, 0)],
        [run(START, 2), run(START + PAGE, 1)],
        [run(START + PAGE, 1), run(START, 1)],
        [run(1 << 56, 1)],
        [run(START, 1 << 63)],
        [run((1 << 64) - PAGE, 2)],
    ],
)
def test_runs_that_no_process_can_have_are_refused(
    tmp_path: Path, runs: Sequence[Mapping[int, int | bytes]]
) -> None:
    with pytest.raises(ImageCorrupt, match="pagemap-1"):
        Pagemap.read(listed(tmp_path / "pagemap-1.img", run(PAGE, 1), *runs))


@pytest.mark.parametrize("flags", [0, 1, 2, 3, 5, 7, 12])
def test_pages_elsewhere_are_left_to_criu(tmp_path: Path, flags: int) -> None:
    path = listed(tmp_path / "pagemap-1.img", run(START, 1), run(START + PAGE, 1, flags))
    assert not Pagemap.read(path).plain
    path = listed(tmp_path / "pagemap-3.img", run(START, 1), run(START + PAGE, 1, 6))
    assert Pagemap.read(path).plain, "CRIU may read them on demand, and need not"
    path = listed(tmp_path / "pagemap-2.img", {1: START, 2: 0, 3: 1, 5: 1})
    assert not Pagemap.read(path).plain


@pytest.mark.parametrize(
    ("protection", "kind", "status", "writable"),
    [
        (BOTH, PRIVATE | ANONYMOUS, 0x201, True),
        (BOTH, PRIVATE | ANONYMOUS, 0x221, True),  # the heap
        (BOTH, PRIVATE, 0x41, True),  # of a file
        (BOTH | mmap.PROT_EXEC, PRIVATE | ANONYMOUS, 0x201, True),
        (READ, PRIVATE | ANONYMOUS, 0x201, False),
        (mmap.PROT_WRITE, PRIVATE | ANONYMOUS, 0x201, False),
        (0, PRIVATE | ANONYMOUS, 0x201, False),
        (BOTH, SHARED | ANONYMOUS, 0x101, False),
        (BOTH, SHARED, 0x81, False),
        (BOTH, PRIVATE | ANONYMOUS | 0x100, 0x201, False),  # grows down
        (BOTH, PRIVATE | ANONYMOUS | 0x40000, 0x201, False),  # hugetlb
        (BOTH, 0x08 | ANONYMOUS, 0x201, False),  # MAP_DROPPABLE
        (BOTH, PRIVATE | ANONYMOUS, 0x209, False),  # vdso
        (BOTH, PRIVATE | ANONYMOUS, 0x1201, False),  # vvar
        (BOTH, PRIVATE | ANONYMOUS, 0x2201, False),  # an AIO ring
        (BOTH, PRIVATE | ANONYMOUS, 0x8201, False),  # a shadow stack
        (BOTH, PRIVATE | ANONYMOUS, 0x10201, False),  # guarded
        (BOTH, PRIVATE | ANONYMOUS, 0x401, False),  # System V
    ],
)
def test_what_is_written_is_private_memory_of_no_special_kind(
    tmp_path: Path, protection: int, kind: int, status: int, writable: bool
) -> None:
    made = vma(START, START + PAGE, protection, kind, status)
    (found,) = areas(mapped(tmp_path / "mm-1.img", made))
    assert found == Area(START, START + PAGE, writable, anonymous=bool(status & 0x200))


@pytest.mark.parametrize(
    "made",
    [
        [vma(START + 1, START + PAGE)],
        [vma(START, START)],
        [vma(START + PAGE, START)],
        [vma(START, 1 << 57)],
        [vma(START, START + 2 * PAGE), vma(START + PAGE, START + 3 * PAGE)],
        [vma(START + PAGE, START + 2 * PAGE), vma(START, START + PAGE)],
        [vma(START, START + 2 * PAGE), vma(START + PAGE, START + 3 * PAGE, READ)],
        [vma(START + PAGE, START + 2 * PAGE, READ), vma(START, START + PAGE, READ)],
        [vma(START, START + PAGE, status=GUARD), vma(START, START + PAGE)],
    ],
)
def test_mappings_that_no_process_can_have_are_refused(
    tmp_path: Path, made: Sequence[Mapping[int, int]]
) -> None:
    with pytest.raises(ImageCorrupt, match="mm-1"):
        areas(mapped(tmp_path / "mm-1.img", *made))


def test_guards_are_within_others_and_behind_them(tmp_path: Path) -> None:
    made = (vma(START, START + 2 * PAGE), vma(START + 2 * PAGE, START + 3 * PAGE, READ))
    guards = (vma(START, START + PAGE, status=GUARD), vma(START, START + PAGE, status=GUARD))
    found = areas(mapped(tmp_path / "mm-1.img", *made, *guards))
    assert [each.writable for each in found] == [True, False, False, False]


def test_a_user_s_program_has_no_aio_rings(tmp_path: Path) -> None:
    path = mapped(tmp_path / "mm-1.img", vma(START, START + PAGE, status=0x2201))
    pagemap.require_no_rings(path)
    (mm,) = ImageFile.read(path).messages
    ring = message([Field.of(1, START), Field.of(2, 64), Field.of(3, PAGE)])
    ImageFile(MAGIC, (mm + message([Field.of(16, ring)]),)).write(path)
    with pytest.raises(Unsupported, match="rings of AIO"):
        pagemap.require_no_rings(path)
    with pytest.raises(ImageCorrupt):
        pagemap.require_no_rings(mapped(path, *[vma(START, START + PAGE, READ)] * 2))


def test_what_a_parent_or_a_child_has_too_is_left_to_criu(tmp_path: Path) -> None:
    tree = [{1: pid, 2: parent, 3: 1, 4: 1, 5: pid} for pid, parent in ((5, 0), (6, 5), (7, 6))]
    found = relatives(written(tmp_path / "pstree.img", *tree))
    assert (found[5], found[6], found[7]) == ({0, 6}, {5, 7}, {6})
    own = [Area(0, 4, True), Area(4, 8, True), Area(8, 9, False), Area(9, 12, True)]
    theirs = [Area(0, 4, False), Area(4, 7, True), Area(9, 12, True)]
    assert [*pagemap.unshared(own, theirs)] == [Area(4, 8, True)]


def test_changed_files_are_refused_or_name_whole_pages_in_order(tmp_path: Path) -> None:
    chance = random.Random(1)
    lists, maps = tmp_path / "pagemap-1.img", tmp_path / "mm-1.img"
    refused = 0
    for _ in range(200):
        runs = (run(START + (at << 20), 256) for at in range(0, 12, 2))
        listed(lists, *runs)
        mapped(maps, *(vma(START + (at << 20), START + (at + 2 << 20)) for at in range(0, 12, 2)))
        for path in (lists, maps):
            image = Tree.read(path)
            for _ in range(chance.choice((0, 1, 2))):
                mutate(image, chance, ["x" * 40])
            image.write(path)
        try:
            found, where = Pagemap.read(lists), [a for a in areas(maps) if a.writable]
        except (Internal, ImageCorrupt) as error:
            refused += 1
            assert error.hint
            continue
        for before, after in pairwise([Run(0, 0, 0), *found.runs]):
            assert before.end <= after.address
            assert after.position == before.position + before.length
        spared, _ = found.divided(where)
        for each in spared:
            assert each.address % PAGE == each.length % PAGE == 0
            assert each.end <= 1 << 56
            assert any(a.start <= each.address and each.end <= a.end for a in where)
    assert 20 < refused < 200


@pytest.mark.parametrize("content", [b"", MAGIC[:4], MAGIC, MAGIC + b"\1", MAGIC + b"\1\0\0\0\x08"])
def test_what_is_no_list_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pagemap-1.img"
    path.write_bytes(content)
    with pytest.raises(PhosError, match="pagemap-1"):
        Pagemap.read(path)
