"""Divide the saved pages of a process: what CRIU puts back at a restore, and what it can be spared.

CRIU's ``pagemap-<pid>.img`` lists runs of pages. The bytes of a run are in ``pages-<number>.img``,
one run after the other, so each begins where those before it end. CRIU reads them with one thread;
runs that it does not find in the list are left as they are mapped, empty, and can be written by
others before the process runs (:mod:`phosd.engine.criu.restore.parallel_pages`). That is possible
where

- the memory is private and the process may write to it, so no right of the mapping is overridden;
- the process shares it with no parent or child: of such memory CRIU makes pages that are equal once
  (``check_cow_vmas`` in CRIU's mem.c), which needs them in its hands;
- the pages are in the process's own file, not in that of an earlier dump;
- the kernel does not write to them before (:mod:`phosd.engine.criu.images.rseq_areas`).

The layouts are those of ``pagemap.proto``, ``mm.proto``, ``vma.proto`` and ``pstree.proto``. What
a user's CRIU wrote is read by root, so every number is checked before it is used.
"""

import mmap
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from phosd.engine.criu.images.fields import (
    MmEntry,
    PagemapEntry,
    PagemapHead,
    PstreeEntry,
    VmaEntry,
)
from phosd.engine.criu.images.image_file import (
    Field,
    ImageFile,
    entries,
    fields,
    message,
    strange,
    varint,
)
from phosd.errors import ImageCorrupt, Reason, Unsupported

LEAST_RUN = 256 << 10
"""Bytes; CRIU itself divides what is longer than 1 MiB. In a PyTorch process with 655 MiB of
private memory, four runs in five are shorter, and have 7% of the bytes.
"""
_LIMIT = 64 << 20
"""Most bytes of a list, of 18 for a run."""
_PAGE = mmap.PAGESIZE
_HIGHEST = 1 << 56
"""No address of a program is as high (page tables of five levels)."""
_USUAL_BYTES = 32
_ADDRESS_TAG = bytes([1 << 3])
_ADDRESS, _COUNT = int(PagemapEntry.VADDR), int(PagemapEntry.NR_PAGES)
_FLAGS, _IN_PARENT = int(PagemapEntry.FLAGS), int(PagemapEntry.IN_PARENT)
"""As plain numbers: a list may have 100,000 runs."""
_ON_DEMAND, _PRESENT = 1 << 1, 1 << 2
"""A run is in this process's file; and CRIU could read it on demand, if it were asked to."""
_MAP_TYPE, _MAP_GROWS_DOWN, _MAP_HUGE = 0x0F, 0x100, 0x40000
_REGULAR, _HEAP, _OF_FILE, _ANONYMOUS, _GUARD = 1 << 0, 1 << 5, 1 << 6, 1 << 9, 1 << 16
_PRIVATE_KINDS = (_REGULAR | _OF_FILE, _REGULAR | _ANONYMOUS)


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
    ``anonymous``: it is of no file, so what was not saved of it is zeros.
    """

    start: int
    end: int
    writable: bool
    anonymous: bool = True


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
        """Read it. Raises :class:`Internal` if CRIU did not write it, and :class:`ImageCorrupt` if
        its runs overlap, are no whole pages, or are where no program has memory.
        """
        file = ImageFile.read(path, _LIMIT)
        if not file.messages:
            raise strange(path)
        pages = _numbers(path, file.messages[0]).get(PagemapHead.PAGES_ID, 0)
        runs, plain = [], True
        position, least = 0, 0
        for each in file.messages[1:]:
            entry = _run_numbers(path, each)
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
        head = message([Field.of(PagemapHead.PAGES_ID, self.pages)])
        ImageFile(self.magic, (head, *map(_entry, self.runs))).write(path)

    @property
    def byte_count(self) -> int:
        """Bytes that the file of pages must have."""
        return sum(run.length for run in self.runs)

    def position(self, address: int) -> int | None:
        """Return where in the file of pages the byte at ``address`` is; None if it is not there."""
        at = bisect_right(self.runs, address, key=lambda run: run.address) - 1
        if at < 0 or address >= self.runs[at].end:
            return None
        return self.runs[at].position + address - self.runs[at].address

    def divided(
        self, areas: Iterable[Area], kept_at: Collection[int] = ()
    ) -> tuple[list[Run], list[Run]]:
        """Return the large runs that are within one of ``areas``, which are in order, and the
        others, with those that have one of the addresses ``kept_at``.
        """
        there = [*areas]
        starts = [area.start for area in there]
        spared: list[Run] = []
        kept: list[Run] = []
        for run in self.runs:
            at = bisect_right(starts, run.address) - 1
            within = at >= 0 and run.end <= there[at].end
            large = run.length >= LEAST_RUN
            at_these = large and any(run.address <= each < run.end for each in kept_at)
            (spared if within and large and not at_these else kept).append(run)
        return spared, kept


def areas(path: Path) -> list[Area]:
    """Return the mappings in ``mm-<pid>.img``.

    Raises :class:`Internal` if CRIU did not write it, and :class:`ImageCorrupt` if writable ones
    are no whole pages, or if any overlap or are in no order: CRIU looks between them for room for
    its own code. After them come the guards (``MADV_GUARD_INSTALL``), which are within others.
    """
    try:
        listed = [*entries(path, MmEntry.VMAS)]
        found = [_area(each) for each in listed]
        guards = [_integer(each[VmaEntry.STATUS]) & _GUARD for each in listed]
    except (KeyError, TypeError) as error:
        raise strange(path) from error
    ordinary = found[: len(found) - sum(map(bool, guards))]
    if any(guards[: len(ordinary)]):
        raise _impossible(path, found[guards.index(_GUARD)].start)
    for area in found:
        whole = not (area.start | area.end) % _PAGE and area.start < area.end <= _HIGHEST
        if area.writable and not whole:
            raise _impossible(path, area.start)
    for before, area in pairwise(ordinary):
        if not before.start < before.end <= area.start < area.end:
            raise _impossible(path, area.start)
    return found


def require_no_rings(path: Path) -> None:
    """Raise :class:`Unsupported` if the process with this ``mm-<pid>.img`` has rings of AIO
    (io_setup(2)), and what :func:`areas` raises.

    CRIU's restorer copies a ring by counts that it reads in the ring's memory, more than once.
    """
    areas(path)
    if any(True for _ in entries(path, MmEntry.AIOS)):
        raise Unsupported(
            f"a user's program has rings of AIO, by what {path.name} says",
            hint="who writes to them steers CRIU, which has capabilities that the program must not "
            "get; only root may restore it",
            reason=Reason.PROCESS_STATE,
        )


def relatives(path: Path) -> dict[int, set[int]]:
    """Return, from ``pstree.img``, the parent and the children of each process, by pid.

    Raises :class:`Internal` if it is not CRIU's.
    """
    found: dict[int, set[int]] = {}
    for each in ImageFile.read(path).messages:
        entry = _numbers(path, each)
        pid, parent = entry.get(PstreeEntry.PID, 0), entry.get(PstreeEntry.PPID, 0)
        found.setdefault(pid, set()).add(parent)
        found.setdefault(parent, set()).add(pid)
    return found


def threads(path: Path) -> Iterator[tuple[int, Sequence[int]]]:
    """Yield, from ``pstree.img``, each process and its threads. Raises :class:`Internal` if it is
    not CRIU's.
    """
    for each in ImageFile.read(path).messages:
        try:
            entry = [(field.number, _integer(field.value)) for field in fields(each)]
        except (ValueError, TypeError) as error:
            raise strange(path) from error
        # Protobuf takes the last value of a field that is there twice.
        pid = [0, *(value for number, value in entry if number == PstreeEntry.PID)][-1]
        yield pid, [value for number, value in entry if number == PstreeEntry.THREADS]


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
    values = {
        PagemapEntry.VADDR: run.address,
        PagemapEntry.COMPAT_NR_PAGES: 0,
        PagemapEntry.FLAGS: _PRESENT,
        PagemapEntry.NR_PAGES: run.length // _PAGE,
    }
    return message(Field.of(number, value) for number, value in values.items())


def _area(entry: Mapping[int, int | bytes]) -> Area:
    start, end, protection, mapped, status = (
        _integer(entry[number])
        for number in (VmaEntry.START, VmaEntry.END, VmaEntry.PROT, VmaEntry.FLAGS, VmaEntry.STATUS)
    )
    both = mmap.PROT_READ | mmap.PROT_WRITE
    private = (
        mapped & _MAP_TYPE == mmap.MAP_PRIVATE
        and not mapped & (_MAP_GROWS_DOWN | _MAP_HUGE)
        and status & ~_HEAP in _PRIVATE_KINDS
    )
    writable = private and protection & both == both
    return Area(start, end, writable, anonymous=bool(status & _ANONYMOUS))


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


def _run_numbers(path: Path, of: bytes) -> dict[int, int]:
    """Return the same of a run. Runs differ in their addresses, which come first, and hardly in
    what follows: that is decoded once.
    """
    if of[:1] != _ADDRESS_TAG or len(of) > _USUAL_BYTES:
        return _numbers(path, of)
    try:
        address, at = varint(of, 1)
        return {_ADDRESS: address, **_following(of[at:])}
    except (ValueError, TypeError) as error:
        raise strange(path) from error


@lru_cache(maxsize=1 << 12)
def _following(of: bytes) -> Mapping[int, int]:
    return {each.number: _integer(each.value) for each in fields(of)}


def _impossible(path: Path, address: int) -> ImageCorrupt:
    return ImageCorrupt(
        f"{path.name} names memory that no process can have, at {address:#x}",
        hint="the image cannot be restored; delete it",
    )
