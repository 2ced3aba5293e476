"""Read the status of files without asking the server of their file system.

``stat`` on a network or FUSE file system waits for its server. A process that waits for a server
that is lost cannot be killed, and keeps what it holds. What this machine knows of an open or mapped
file is enough: in a dump CRIU has asked for it just before.
"""

import ctypes
import errno
import functools
import os
import struct
from collections.abc import Callable
from pathlib import Path

_AT_FDCWD = -100
_AT_STATX_DONT_SYNC = 0x4000
_BASIC_STATS = 0x7FF
_STATX = struct.Struct("<IIQIIIH2xQQQQqI4xqI4xqI4xqI4xIIII")
"""``struct statx`` as far as the device numbers."""
_SIZE = 256

LOCAL = frozenset(
    (
        *("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs"),
        *("hugetlbfs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"),
    )
)
"""Types of file systems that ask no server for anything, as in ``mountinfo``."""


def known_status(link: "Path | str") -> os.stat_result:
    """Return the status, as this machine knows it, of the file behind a link of ``/proc``.

    Raises :class:`OSError`: FileNotFoundError if there is no such link (any more), PermissionError
    if its file system (FUSE) is for one user only, who is not the caller.
    """
    buffer = ctypes.create_string_buffer(_SIZE)
    asked = (_AT_FDCWD, os.fsencode(link), _AT_STATX_DONT_SYNC, _BASIC_STATS, buffer)
    if _libc().statx(*asked) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(link))
    found = _STATX.unpack_from(buffer)
    _, block_size, _, links, uid, gid, mode, inode, size, blocks, _ = found[:11]
    accessed, _, changed, modified = (10**9 * found[at] + found[at + 1] for at in (11, 13, 15, 17))
    special_major, special_minor, major, minor = found[19:]
    device = os.makedev(major, minor)
    seconds = (at // 10**9 for at in (accessed, modified, changed))
    return os.stat_result(
        (mode, inode, device, links, uid, gid, size, *seconds),
        {
            "st_atime_ns": accessed,
            "st_mtime_ns": modified,
            "st_ctime_ns": changed,
            "st_blksize": block_size,
            "st_blocks": blocks,
            "st_rdev": os.makedev(special_major, special_minor),
        },
    )


def open_known(link: "Path | str", device: int, inode: int, flags: int) -> int:
    """Open the file behind a link of ``/proc`` as :func:`open_wanted` does, if it is this one."""

    def is_it(place: str) -> bool:
        now = known_status(place)
        return (now.st_dev, now.st_ino) == (device, inode)

    return open_wanted(link, is_it, flags)


def open_wanted(link: "Path | str", is_it: Callable[[str], bool], flags: int) -> int:
    """Open the file behind a link of ``/proc``, once ``is_it`` has seen a link to this very file. A
    program that runs may have given the descriptor to another file meanwhile, also to one that it
    may not read itself.

    Raises :class:`OSError`: FileNotFoundError if there is no such link, or it is another file.
    """
    place = os.open(link, os.O_PATH | os.O_CLOEXEC)
    try:
        held = f"/proc/self/fd/{place}"
        if not is_it(held):
            raise FileNotFoundError(errno.ENOENT, "it is another file now", str(link))
        return os.open(held, flags | os.O_CLOEXEC | os.O_NOCTTY)
    finally:
        os.close(place)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
