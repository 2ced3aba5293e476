"""Find what uprobes (perf, bpftrace, monitors) have changed in the memory of a process.

For a probe the kernel puts a breakpoint into the process's own page of a file. For one at the
return of a function it puts an address of the mapping ``[uprobes]`` in the place of the caller's on
the stack, for as long as the function runs. That mapping stays when the probes are gone, and is
then without meaning.
"""

import contextlib
import mmap
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phosd.engine.system import procfs

AREA = "[uprobes]"
OPTIMIZED = "[uprobes-trampoline]"
"""A mapping that calls lead to, in the place of breakpoints, as of Linux 6.18."""
_BREAKPOINT = 0xCC
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
"""Bits of an entry in ``/proc/pid/pagemap``."""
_MOST_STACK = 8 << 20
"""Bytes of a stack that are looked at: a thread's usual limit."""


@dataclass(frozen=True)
class _Area:
    start: int
    end: int
    permissions: str
    offset: int
    inode: int
    path: str

    @property
    def may_be_probed(self) -> bool:
        """Whether it is of a program or library, which the kernel puts breakpoints into."""
        return self.permissions == "r-xp" and self.inode != 0


def traces(pid: int) -> list[str]:
    """Return the places that uprobes have changed, in words. A process without :data:`AREA` has
    none.

    The places of a process that runs may change, and threads that run are not looked at. Reads the
    files that it maps, so it may be held up by a file system. Raises :class:`OSError` if the
    process has ended.
    """
    areas = _areas(pid)
    memory = os.open(procfs.PROC / str(pid) / "mem", os.O_RDONLY)
    try:
        found = [
            f"{area.path}+{at:#x}"
            for area in areas
            if area.may_be_probed
            for at in _breakpoints(pid, memory, area)
        ]
        for trampoline in (area.start for area in areas if area.path == AREA):
            found += [
                f"the return of a function that thread {thread} is in"
                for thread in procfs.threads(pid)
                if trampoline in _stack(thread, memory, areas)
            ]
    finally:
        os.close(memory)
    return found


def _areas(pid: int) -> list[_Area]:
    text = (procfs.PROC / str(pid) / "maps").read_bytes().decode(errors="surrogateescape")
    found = []
    for line in text.split("\n")[:-1]:
        addresses, permissions, offset, _, inode, *path = line.split(None, 5)
        start, end = (int(each, 16) for each in addresses.split("-"))
        found.append(
            _Area(start, end, permissions, int(offset, 16), int(inode), path[0] if path else "")
        )
    return found


def _breakpoints(pid: int, memory: int, area: _Area) -> Iterator[int]:
    """Yield the offsets in the file of breakpoints that are not in the file."""
    folder = procfs.PROC / str(pid)
    own = [*_own_pages(folder, area)]
    if not own:
        return
    file = os.open(folder / "map_files" / f"{area.start:x}-{area.end:x}", os.O_RDONLY)
    try:
        for page in own:
            offset = area.offset + page - area.start
            saved = os.pread(file, mmap.PAGESIZE, offset)
            now = os.pread(memory, mmap.PAGESIZE, page)
            for at, (byte, was) in enumerate(zip(now, saved, strict=False)):
                if byte == _BREAKPOINT != was:
                    yield offset + at
    finally:
        os.close(file)


def _own_pages(folder: Path, area: _Area) -> Iterator[int]:
    """Yield the pages of a mapped file that are the process's own. Only these may differ."""
    entries = array("Q")
    with (folder / "pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(area.start // mmap.PAGESIZE * entries.itemsize)
        entries.frombytes(pagemap.read((area.end - area.start) // mmap.PAGESIZE * entries.itemsize))
    for number, entry in enumerate(entries):
        if entry & (_PRESENT | _SWAPPED) and not entry & _OF_FILE:
            yield area.start + number * mmap.PAGESIZE


def _stack(thread: int, memory: int, areas: list[_Area]) -> "array[int]":
    """Return the words on the stack of a thread that waits or stands still; none if it runs."""
    found = array("Q")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
        words = (procfs.PROC / str(thread) / "syscall").read_text().split()
        if words[0] != "running":
            top = int(words[-2], 16) & -found.itemsize
            end = next((area.end for area in areas if area.start <= top < area.end), top)
            size = min(end - top, _MOST_STACK)
            found.frombytes(os.pread(memory, size, top) if size else b"")
    return found
