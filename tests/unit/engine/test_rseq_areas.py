"""Where a thread's area of restartable sequences may be, and what may have been saved in it."""

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.criu.images import pagemap, rseq_areas
from phosd.engine.criu.images.image_file import Field, ImageFile, message
from phosd.engine.criu.images.pagemap import Pagemap
from phosd.engine.criu.images.rseq_areas import Area
from phosd.errors import ImageCorrupt, Internal, Unsupported

PAGE = mmap.PAGESIZE
START = 0x7F0000000000
PROCESS, THREAD, PAGES = 7, 8, 3
ANONYMOUS, OF_FILE, SHARED, HEAP = 0x201, 0x41, 0x101, 0x221
PRIVATE_KIND, SHARED_KIND = 0x22, 0x21
Entry = Mapping[int, int | bytes]


def written(path: Path, *messages: Sequence[tuple[int, int | bytes]]) -> None:
    path.touch()
    ImageFile(bytes(8), tuple(message(Field.of(*each) for each in one) for one in messages)).write(
        path
    )


def vma(start: int, end: int, status: int = ANONYMOUS, kind: int = PRIVATE_KIND) -> bytes:
    values = {1: start, 2: end, 3: 0, 4: 0, 5: 3, 6: kind, 7: status, 8: 1}
    return message(Field.of(*each) for each in values.items())


class Images:
    """Images of a process with two threads, of which the second has an area at ``area``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.area = START + PAGE + 32
        self.size = 32
        self.mappings = [vma(START, START + 3 * PAGE)]
        self.pages = [START + PAGE, START + 2 * PAGE]
        self.content = bytearray(os.urandom(2 * PAGE))
        self.content[40:48] = bytes(8)

    def write(self) -> Path:
        area = message([Field.of(1, self.area), Field.of(2, self.size), Field.of(3, 0x53053053)])
        for thread, fields in ((PROCESS, []), (THREAD, [Field.of(15, area)])):
            core = message([Field.of(1, 0), *fields])
            written(self.folder / f"core-{thread}.img", [(5, core)])
        written(self.folder / "pstree.img", [(1, PROCESS), (2, 0), (5, PROCESS), (5, THREAD)])
        written(self.folder / f"mm-{PROCESS}.img", [(14, each) for each in self.mappings])
        runs = [[(1, page), (2, 0), (4, 4), (5, 1)] for page in self.pages]
        written(self.folder / f"pagemap-{PROCESS}.img", [(1, PAGES)], *runs)
        (self.folder / f"pages-{PAGES}.img").write_bytes(self.content)
        return self.folder


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(tmp_path)


def test_the_area_of_a_thread_is_found(images: Images) -> None:
    images.size = 64
    found = rseq_areas.areas(images.write())
    assert found == [Area(PROCESS, THREAD, images.area, images.area + 64)]
    images.area = 0
    assert rseq_areas.areas(images.write()) == []


OTHERS: dict[str, dict[str, Any]] = {
    "private": {},
    "heap": {"mappings": [vma(START, START + 3 * PAGE, HEAP)]},
    "private, of a file, and saved": {"mappings": [vma(START, START + 3 * PAGE, OF_FILE)]},
    "not saved": {"pages": []},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
def test_private_memory_is_a_process_s_own(images: Images, changes: dict[str, Any]) -> None:
    vars(images).update(changes)
    rseq_areas.require_harmless(images.write())


REFUSED: dict[str, dict[str, Any]] = {
    "shared": {"mappings": [vma(START, START + 3 * PAGE, SHARED, SHARED_KIND)]},
    "shared, of a file": {"mappings": [vma(START, START + 3 * PAGE, 0x81, 1)]},
    "said to be private": {"mappings": [vma(START, START + 3 * PAGE, ANONYMOUS, SHARED_KIND)]},
    "of a file": {"mappings": [vma(START, START + 3 * PAGE, OF_FILE)], "pages": [START]},
    "partly of a file": {
        "mappings": [vma(START, START + 3 * PAGE, OF_FILE)],
        "pages": [START + PAGE],
        "area": START + 2 * PAGE - 32,
        "size": 64,
    },
    "an AIO ring": {"mappings": [vma(START, START + 3 * PAGE, 0x2201)]},
    "nowhere": {"mappings": [vma(START + 2 * PAGE, START + 3 * PAGE)]},
    "partly nowhere": {
        "mappings": [vma(START, START + PAGE)],
        "area": START + PAGE - 32,
        "size": 64,
    },
    "longer than all memory": {"size": (1 << 32) - 1},
    "at the end of all memory": {"area": (1 << 64) - 32},
    "in two": {
        "mappings": [vma(START, START + PAGE), vma(START + PAGE, START + 2 * PAGE)],
        "area": START + PAGE - 32,
        "size": 64,
    },
    "askew": {"area": START + PAGE + 24},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_memory_that_others_may_write_to_is_refused(
    images: Images, changes: dict[str, Any]
) -> None:
    vars(images).update(changes)
    folder = images.write()
    for refuses in (rseq_areas.require_own, rseq_areas.require_harmless):
        with pytest.raises(Unsupported, match=rf"thread {THREAD} has its area .* \(rseq\)"):
            refuses(folder)


def test_mappings_that_hide_others_are_refused(images: Images) -> None:
    shared = vma(START + PAGE, START + 2 * PAGE, SHARED, SHARED_KIND)
    images.mappings = [vma(START, START + 3 * PAGE), shared]
    with pytest.raises(ImageCorrupt, match=f"mm-{PROCESS}"):
        rseq_areas.require_own(images.write())


@pytest.mark.parametrize("at", range(8))
def test_a_critical_section_is_refused_and_cleared(images: Images, at: int) -> None:
    images.content[40 + at] = 1
    folder = images.write()
    rseq_areas.require_own(folder)
    with pytest.raises(Unsupported, match=f"critical section .* of thread {THREAD}"):
        rseq_areas.require_harmless(folder)
    rseq_areas.clear(folder)
    rseq_areas.require_harmless(folder)
    images.content[40 + at] = 0
    assert (folder / f"pages-{PAGES}.img").read_bytes() == images.content


def test_an_area_is_none_of_large_runs_that_others_put_back(images: Images) -> None:
    """The kernel writes to it before."""
    images.pages = [START]
    images.mappings = [vma(START, START + (1 << 20))]
    folder = images.write()
    runs = [[(1, START + (at << 19)), (2, 0), (4, 4), (5, 128)] for at in range(2)]
    written(folder / f"pagemap-{PROCESS}.img", [(1, PAGES)], *runs)
    found = Pagemap.read(folder / f"pagemap-{PROCESS}.img")
    (area,) = rseq_areas.areas(folder)
    (mapped,) = pagemap.areas(folder / f"mm-{PROCESS}.img")
    assert found.divided([mapped]) == ([*found.runs], [])
    assert found.divided([mapped], [area.start]) == ([found.runs[1]], [found.runs[0]])


@pytest.mark.parametrize("name", ["core-8", "pstree", "mm-7", "pagemap-7"])
def test_what_is_no_image_is_refused(images: Images, name: str) -> None:
    folder = images.write()
    path = folder / f"{name}.img"
    for damaged in (path.read_bytes()[:-1], b"rubbish, and not a little of it"):
        path.write_bytes(damaged)
        with pytest.raises(Internal):
            rseq_areas.require_harmless(folder)
