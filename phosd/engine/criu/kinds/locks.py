"""Locks on files that a saved tree has. CRIU would wait for one that another program has."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from phosd.engine.criu.files.file_orders import Inode
from phosd.engine.criu.images.fields import FileLockEntry
from phosd.engine.criu.images.saved_files import SavedFiles, messages, number_in
from phosd.engine.system import procfs
from phosd.engine.system.unkillable_reads import describe

LOCKS = "filelocks.img"
_READ_LOCK = 0
"""``F_RDLCK``, also of ``flock``, as CRIU writes it."""
_LOCK = re.compile(r"\d+: (\w+) +\w+ +(READ|WRITE|UNLCK|RW|NONE) +(-?\d+) (\w+):(\w+):(\d+) ")
_HELD = procfs.PROC / "locks"


class Lock(NamedTuple):
    """A lock on a file; others may have it, too, if it is ``shared``."""

    path: str
    shared: bool


def locks_of(files: SavedFiles) -> Iterator[Lock]:
    """Yield the locks that the tree has."""
    path = files.folder / LOCKS
    for each in messages(path) if path.exists() else ():
        pid, descriptor = number_in(each, FileLockEntry.PID), number_in(each, FileLockEntry.FD)
        if name := files.path_of(pid, descriptor):
            yield Lock(name, number_in(each, FileLockEntry.TYPE) == _READ_LOCK)


def locked(wanted: Iterable[Lock], inodes: Iterable[Inode]) -> Iterator[str]:
    """Yield which of the locks others have now, and who. ``inodes`` are the files' now."""
    files = {inode.path: inode for inode in inodes}
    there = _held() if files else {}
    for lock in wanted:
        inode = files.get(lock.path)
        for holder, exclusive, device in there.get(inode.number, ()) if inode else ():
            known = inode is not None and (device == inode.device or _has_open(holder, inode))
            if known and (exclusive or not lock.shared):
                whose = f", which {describe(holder)} has" if holder > 0 else ""
                yield f"a lock on {lock.path}{whose}"
                break


def _held() -> dict[int, list[tuple[int, bool, int]]]:
    """Return the holders of locks by the number of the file's inode: the pid, whether it is
    exclusive, and the device.
    """
    found: defaultdict[int, list[tuple[int, bool, int]]] = defaultdict(list)
    for line in _HELD.read_text().splitlines():
        if match := _LOCK.match(line):
            _, kind, pid, major, minor, number = match.groups()
            device = os.makedev(int(major, 16), int(minor, 16))
            found[int(number)].append((int(pid), kind != "READ", device))
    return found


def _has_open(pid: int, inode: Inode) -> bool:
    """Return whether a process has the file open: some file systems tell another device."""
    try:
        opened = [each.file for each in procfs.descriptors(pid, without=OSError)]
    except OSError:  # it has ended, or is in another namespace
        return False
    return any((each.st_dev, each.st_ino) == (inode.device, inode.number) for each in opened)
