"""Refuse to put other memory in the place of what a program keeps open to share it (hazard 64).

A descriptor of exported memory names the memory. A checkpoint gives a program the same memory back,
and a restore other descriptors; after a suspension or a move the program's own still lead to what
the memory was before, and only the program can exchange them.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from phosd.engine.memory.exported import ExportedBlock, distinct
from phosd.engine.system import procfs
from phosd.engine.system.kcmp import order
from phosd.errors import Reason, Unsupported


def require_none_kept_open(pids: Iterable[int], shared: Iterable[ExportedBlock]) -> None:
    """Raise :class:`Unsupported` if one of these processes has a descriptor of a ``shared`` block.
    They must be parked: no hook has one then.
    """
    ours = [*distinct(shared)]
    names = {str(Path(f"/proc/self/fd/{each.descriptor}").readlink()) for each in ours}
    sought = sorted(ours, key=functools.cmp_to_key(_in_kernels_order))
    for pid in pids if sought else ():
        for number in _open_as(pid, names):
            if _is_one_of(sought, pid, number):
                raise Unsupported(
                    f"{procfs.describe(pid)} keeps device memory open to share it, and its "
                    f"descriptor {number} would lead to what the memory was before",
                    hint="the program goes on; a restore gives it another descriptor: "
                    "`phos checkpoint --end`, then `phos restore` (`--gpu` for another GPU)",
                    reason=Reason.SHARED_MEMORY,
                )


def _open_as(pid: int, names: set[str]) -> Iterator[int]:
    """Yield the numbers of a process's descriptors that have one of these names."""
    try:
        for path in (procfs.PROC / str(pid) / "fd").iterdir():
            try:
                if str(path.readlink()) in names:
                    yield int(path.name)
            except FileNotFoundError:
                continue  # it was closed meanwhile
    except (FileNotFoundError, ProcessLookupError):
        return  # the process has ended


def _in_kernels_order(one: ExportedBlock, other: ExportedBlock) -> int:
    return order(one.descriptor, other.descriptor) or 0


def _is_one_of(blocks: Sequence[ExportedBlock], pid: int, number: int) -> bool:
    """Return whether a descriptor of a process is of one of these blocks, in the kernel's order."""
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high) // 2
        found = order(blocks[middle].descriptor, number, pid)
        if not found:  # it is, or it was closed
            return found == 0
        low, high = (middle + 1, high) if found < 0 else (low, middle)
    return False
