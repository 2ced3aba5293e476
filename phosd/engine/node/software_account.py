"""Read how much memory of a software GPU is in use, and by whom, from its account.

The account is a file for each GPU (``phosd/softgpu/core/registry.h``): records of inode, bytes, pid
and claims, one for each process and allocation. Any user may write to it, and its lock can be held
for ever, so it is read without, and believed no further than for showing figures.
"""

import os
import stat
import struct
from pathlib import Path

_RECORD = struct.Struct("=QQII")
_MOST_BYTES = 64 << 20
_FOLDER = "/dev/shm/phos-softgpu"


def used(ordinal: int, total: int) -> tuple[int, tuple[int, ...]]:
    """Return the bytes in use of a GPU with ``total`` bytes, and the pids that have some; none if
    there is no account yet.
    """
    folder = Path(os.environ.get("PHOS_SOFTGPU_DIR") or _FOLDER)
    records = [*_RECORD.iter_unpack(_content(folder / f"gpu{ordinal}"))]
    living = _living() if records else set()
    sizes = {inode: size for inode, size, pid, _ in records if pid in living}
    return min(sum(sizes.values()), total), tuple(sorted({r[2] for r in records} & living))


def _content(path: Path) -> bytes:
    """Return whole records of the file; nothing if it is no plain file."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        account = os.open(path, flags)
    except OSError:  # there is none yet, or somebody has put something else there
        return b""
    try:
        if not stat.S_ISREG(os.fstat(account).st_mode):
            return b""
        content = os.pread(account, _MOST_BYTES, 0)
    finally:
        os.close(account)
    return content[: len(content) // _RECORD.size * _RECORD.size]


def _living() -> set[int]:
    """Return the processes with a software GPU: each listens on a socket that has its pid."""
    prefix = "@phos-softgpu-"
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    names = (line.rpartition(" ")[2] for line in lines)
    pids = (name.removeprefix(prefix) for name in names if name.startswith(prefix))
    return {int(pid) for pid in pids if pid.isascii() and pid.isdecimal()}
