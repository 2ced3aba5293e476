"""Divide the saved pages of a process: what CRIU puts back at a restore, and what it can be spared.

CRIU's ``pagemap-<pid>.img`` lists runs of pages. The bytes of a run are in ``pages-<number>.img``,
one run after the other, so each begins where those before it end. CRIU reads them with one thread;
runs that it does not find in the list are left as they are mapped, empty, and can be written by
others before the process runs (:mod:`phosd.engine.criu.spared_pages`). That is possible where

- the memory is private and the process may write to it, so no right of the mapping is overridden;
- the process shares it with no parent or child: of such memory CRIU makes pages that are equal once
  (``check_cow_vmas`` in CRIU's mem.c), which needs them in its hands;
- the pages are in the process's own file, not in that of an earlier dump.

The layouts are those of ``pagemap.proto``, ``mm.proto``, ``vma.proto`` and ``pstree.proto``. What
a user's CRIU wrote is read by root, so every number is checked before it is used.
"""

import mmap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from phosd.engine.criu.image_file import Field, ImageFile, entries, fields, message, strange
from phosd.errors import ImageCorrupt

LEAST_RUN = 256 << 10
"""Bytes; CRIU itself divides what is longer than 1 MiB. Of a process of PyTorch's with 655 MiB of
private memory 7% are in shorter runs, which are four in five."""
_PAGE = mmap.PAGESIZE
_HIGHEST = 1 << 56
"""No address of a program is as high (page tables of five levels)."""
_HEAD_PAGES = 1
_ADDRESS, _OLD_COUNT, _IN_PARENT, _FLAGS, _COUNT = 1, 2, 3, 4, 5
_ON_DEMAND, _PRESENT = 1 << 1, 1 << 2
"""A run is in this process's file; and CRIU could read it on demand, if it were asked to."""
_VMAS = 14
_START, _END, _PROTECTION, _MAPPED, _STATUS = 1, 2, 5, 6, 7
_MAP_TYPE, _MAP_GROWS_DOWN, _MAP_HUGE = 0x0F, 0x100, 0x40000
_REGULAR, _HEAP, _OF_FILE, _ANONYMOUS = 1 << 0, 1 << 5, 1 << 6, 1 << 9
_PRIVATE_KINDS = (_REGULAR | _OF_FILE, _REGULAR | _ANONYMOUS)
_PID, _PARENT = 1, 2


class Run(NamedTuple):
    """``length`` bytes of memory at ``address``, which are at ``position`` in the file of pages."""

    address: int
    length: int
    position: int

    @property
    def end(self) -> int:
        return self.address + self.length


class Area(NamedTuple):
    """A mapping of a process, from ``start`` to ``end``.

    ``writable``: it is private, the process may read and write it, and it is of no special kind.
    """

    start: int
    end: int
    writable: bool


@dataclass(frozen=True)
class Pagemap:
    """The list of a process's runs, in order. ``pages`` is the number of the file with the bytes;
    ``plain``: all of them are in it.
    """

    magic: bytes
    pages: int
    runs: tuple[Run, ...]
    plain: bool

    @classmethod
    def read(cls, path: Path) -> "Pagemap":
        """Read it. Raises :class:`Internal` if it is none of CRIU's, and :class:`ImageCorrupt` if
        its runs overlap, are no whole pages, or are where no program has memory.
        """
        file = ImageFile.read(path)
        if not file.messages:
            raise strange(path)
        pages = _numbers(path, file.messages[0]).get(_HEAD_PAGES, 0)
        runs, plain = [], True
        position, least = 0, 0
        for each in file.messages[1:]:
            entry = _numbers(path, each)
            run = Run(entry.get(_ADDRESS, 0), entry.get(_COUNT, 0) * _PAGE, position)
            if run.address % _PAGE or not run.length or run.address < least or run.end > _HIGHEST:
                raise _impossible(path, run.address)
            here = entry.get(_FLAGS, 0) & ~_ON_DEMAND == _PRESENT and not entry.get(_IN_PARENT)
            plain = plain and here
            runs.append(run)
            position, least = position + run.length, run.end
        return cls(file.magic, pages, tuple(runs), plain)

    def write(self, path: Path) -> None:
        """Put it in the place of the one at ``path``."""
        head = message([Field.of(_HEAD_PAGES, self.pages)])
        ImageFile(self.magic, (head, *map(_entry, self.runs))).write(path)

    @property
    def byte_count(self) -> int:
        """Bytes that the file of pages must have."""
        return sum(run.length for run in self.runs)

    def divided(self, areas: Iterable[Area]) -> tuple[list[Run], list[Run]]:
        """Return the large runs that are within one of ``areas``, which are in order, and the
        others.
        """
        there = [*areas]
        starts = [area.start for area in there]
        spared: list[Run] = []
        kept: list[Run] = []
        for run in self.runs:
            at = bisect_right(starts, run.address) - 1
            within = at >= 0 and run.end <= there[at].end
            (spared if within and run.length >= LEAST_RUN else kept).append(run)
        return spared, kept


def areas(path: Path) -> list[Area]:
    """Return the mappings in ``mm-<pid>.img``.

    Raises :class:`Internal` if it is none of CRIU's, and :class:`ImageCorrupt` if writable ones
    overlap, or are no whole pages.
    """
    try:
        found = [_area(each) for each in entries(path, _VMAS)]
    except (KeyError, TypeError) as error:
        raise strange(path) from error
    writable = [area for area in found if area.writable]
    for area in writable:
        if (area.start | area.end) % _PAGE or not area.start < area.end <= _HIGHEST:
            raise _impossible(path, area.start)
    for before, area in pairwise(writable):
        if area.start < before.end:
            raise _impossible(path, area.start)
    return found


def relatives(path: Path) -> dict[int, set[int]]:
    """Return, from ``pstree.img``, the parent and the children of each process, by pid.

    Raises :class:`Internal` if it is not CRIU's.
    """
    found: dict[int, set[int]] = {}
    for each in ImageFile.read(path).messages:
        entry = _numbers(path, each)
        pid, parent = entry.get(_PID, 0), entry.get(_PARENT, 0)
        found.setdefault(pid, set()).add(parent)
        found.setdefault(parent, set()).add(pid)
    return found


def unshared(own: Iterable[Area], of_relatives: Iterable[Area]) -> Iterator[Area]:
    """Yield the writable areas that no relative has. CRIU takes areas with the same ends for one
    that a child has from its parent.
    """
    shared = {(area.start, area.end) for area in of_relatives}
    return (area for area in own if area.writable and (area.start, area.end) not in shared)


def packed(runs: Sequence[Run]) -> list[Run]:
    """Return runs as they are in a file that has these alone."""
    found, position = [], 0
    for run in runs:
        found.append(run._replace(position=position))
        position += run.length
    return found


def _entry(run: Run) -> bytes:
    values = {_ADDRESS: run.address, _OLD_COUNT: 0, _FLAGS: _PRESENT, _COUNT: run.length // _PAGE}
    return message(Field.of(number, value) for number, value in values.items())


def _area(entry: Mapping[int, int | bytes]) -> Area:
    start, end, protection, mapped, status = (
        _integer(entry[number]) for number in (_START, _END, _PROTECTION, _MAPPED, _STATUS)
    )
    both = mmap.PROT_READ | mmap.PROT_WRITE
    private = (
        mapped & _MAP_TYPE == mmap.MAP_PRIVATE
        and not mapped & (_MAP_GROWS_DOWN | _MAP_HUGE)
        and status & ~_HEAP in _PRIVATE_KINDS
    )
    return Area(start, end, private and protection & both == both)


def _integer(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise TypeError("a number was expected")
    return value


def _numbers(path: Path, of: bytes) -> dict[int, int]:
    """Return the fields of a message that has only numbers."""
    try:
        return {each.number: _integer(each.value) for each in fields(of)}
    except (ValueError, TypeError) as error:
        raise strange(path) from error


def _impossible(path: Path, address: int) -> ImageCorrupt:
    return ImageCorrupt(
        f"{path.name} names memory that no process can have, at {address:#x}",
        hint="the image cannot be restored; delete it",
    )
