"""Judge descriptors that programs send before they are closed.

To close a file on FUSE asks its server, and to close a socket may wait for its peer (SO_LINGER);
who waits for that cannot be killed. A program's user may be either. Memory is in no such file, so
these are never closed: they stay open, and phosd asks that hook nothing more
(:mod:`~phosd.engine.hook_client.distrust`). Whatever a hook sends is received, since the kernel
closes what is not, in the thread of phosd that reads.
"""

import functools
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from phosd.engine.system import mounts, procfs
from phosd.engine.system.file_status import LOCAL, known_status


def without_files_of_others(descriptors: Iterable[int]) -> list[int]:
    """Return the descriptors that may be closed. The others stay open for ever."""
    return [descriptor for descriptor in descriptors if _may_be_closed(descriptor)]


def _may_be_closed(descriptor: int) -> bool:
    """Return whether it is memory, a device, a pipe, or a file on a local disk."""
    here = procfs.PROC / "self"
    try:
        file = known_status(here / "fd" / str(descriptor))
    except OSError:  # FUSE that is for its user alone, or has been lost
        return False
    if stat.S_ISSOCK(file.st_mode):
        return False
    if not (stat.S_ISREG(file.st_mode) or stat.S_ISDIR(file.st_mode)):
        return True
    if file.st_dev == _memory_device():
        return True
    return mounts.mount_types(os.getpid()).get(_mount_of(descriptor)) in LOCAL


@functools.cache
def _memory_device() -> int:
    """Return the ``st_dev`` of what ``memfd_create`` makes."""
    memory = os.memfd_create("phos-probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(memory).st_dev
    finally:
        os.close(memory)


def _mount_of(descriptor: int) -> int:
    text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    return int(text.partition("mnt_id:")[2].split()[0])
