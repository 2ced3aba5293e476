"""Keep a program's restartable sequences (rseq(2)) from leading CRIU into the program's code.

A thread tells the kernel of an area in its memory. A word of it, ``rseq_cs``, names a critical
section and what to do when that is interrupted: the kernel then has the thread go on at the
section's abort handler. CRIU's restorer registers the areas of all threads while it has its
capabilities. Whoever writes to the word then, or before the dump, would make the kernel
jump out of the restorer into their own code, with these capabilities. So

- an area is in memory to which nobody writes but its process: private, and in pages of its own, not
  in those of a file;
- its word is 0 in an image. The program does not miss what was there: the kernel itself clears the
  word of a thread that it interrupts outside of the section. For a thread inside CRIU has noted the
  section, and writes the word when the capabilities are gone, or it has set the thread to the abort
  handler.

What CRIU's images say may be a user's, so it is checked.
"""

import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.criu.images import core_image, pagemap
from phosd.engine.criu.images.pagemap import Pagemap
from phosd.errors import Reason, Unsupported

_SECTION, _SECTION_BYTES = 8, 8
"""Where the word is in an area."""
_NONE = bytes(_SECTION_BYTES)
_ALIGNMENT = 32
_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Area:
    """The area of a thread, from ``start`` to ``end`` in the memory of its process."""

    process: int
    thread: int
    start: int
    end: int


def areas(folder: Path) -> list[Area]:
    """Return the areas of all threads in CRIU's images. Raises :class:`Internal` for images that
    are not CRIU's.
    """
    registered = {}
    for path in folder.glob("core-*.img"):
        if found := core_image.rseq_area(path):
            registered[int(path.stem.removeprefix("core-"))] = found
    if not registered:
        return []
    return [
        Area(process, thread, *registered[thread])
        for process, threads in pagemap.threads(folder / "pstree.img")
        for thread in threads
        if thread in registered
    ]


def require_own(folder: Path) -> None:
    """Raise :class:`Unsupported` if an area in CRIU's images is in memory to which others may
    write, and :class:`ImageCorrupt` if mappings overlap, of which nobody can tell.
    """
    for process, theirs in _by_process(folder).items():
        _require_own(folder, process, theirs)


def require_harmless(folder: Path) -> None:
    """Raise what :func:`require_own` raises, and :class:`Unsupported` if an area in CRIU's images
    names a critical section.
    """
    for process, theirs in _by_process(folder).items():
        saved = _require_own(folder, process, theirs)
        for area, pages, position in _words(folder, saved, theirs, os.O_RDONLY):
            if os.pread(pages, _SECTION_BYTES, position) != _NONE:
                raise Unsupported(
                    f"the image has a critical section (rseq) of thread {area.thread}, to which "
                    "CRIU could be led",
                    hint="phosd does not make such images; save the program again, where it runs",
                    reason=Reason.PROCESS_STATE,
                )


def clear(folder: Path) -> None:
    """Clear the critical sections that areas in CRIU's images, which are root's, name."""
    for process, theirs in _by_process(folder).items():
        saved = Pagemap.read(_list(folder, process))
        for _, pages, position in _words(folder, saved, theirs, os.O_RDWR):
            if os.pread(pages, _SECTION_BYTES, position) != _NONE:
                os.pwrite(pages, _NONE, position)


def _by_process(folder: Path) -> dict[int, list[Area]]:
    found: dict[int, list[Area]] = {}
    for area in areas(folder):
        found.setdefault(area.process, []).append(area)
    return found


def _require_own(folder: Path, process: int, theirs: Iterable[Area]) -> Pagemap:
    """Raise as :func:`require_own` does; returns the list of the process's saved pages."""
    mappings = pagemap.areas(folder / f"mm-{process}.img")
    saved = Pagemap.read(_list(folder, process))
    for area in theirs:
        pages = range(area.start // _PAGE * _PAGE, area.end, _PAGE)
        own = any(
            each.writable
            and each.start <= area.start < area.end <= each.end
            and (each.anonymous or all(saved.position(page) is not None for page in pages))
            for each in mappings
        )
        if not own or area.start % _ALIGNMENT:
            raise Unsupported(
                f"thread {area.thread} has its area of restartable sequences (rseq) at "
                f"{area.start:#x}, in memory to which other processes may write",
                hint="CRIU could be led into code of theirs; keep such areas in private memory, as "
                "the C library does",
                reason=Reason.PROCESS_STATE,
            )
    return saved


def _words(
    folder: Path, saved: Pagemap, theirs: Iterable[Area], flags: int
) -> Iterator[tuple[Area, int, int]]:
    """Yield each area of a process whose word was ``saved``, the open file of pages, and where in
    it the word is.
    """
    path = folder / f"pages-{saved.pages}.img"
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        for area in theirs:
            position = saved.position(area.start + _SECTION)
            if position is not None:
                yield area, descriptor, position
    finally:
        os.close(descriptor)


def _list(folder: Path, process: int) -> Path:
    return folder / f"pagemap-{process}.img"
