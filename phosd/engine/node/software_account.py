"""Read how much memory of a software GPU is in use, and by whom, from its account.

The account is a file for each GPU (``phosd/softgpu/core/registry.h``): records of inode, bytes, a
token of the process, pid and claims, one for each process and allocation. Any user may write to
it, and its lock can be held for ever, so it is read without, and believed no further than for
showing figures.
"""

import contextlib
import os
import re
import stat
import struct
from pathlib import Path

from phosd.engine.system import pid_namespaces, procfs

_RECORD = struct.Struct("=QQQII")
_MOST_BYTES = 64 << 20
_NAME = re.compile(r"@phos-softgpu-(\d{1,10})-([0-9a-f]{16})")
_FOLDER = "/dev/shm/phos-softgpu"


def used(ordinal: int, total: int) -> tuple[int, tuple[int, ...]]:
    """Return the bytes in use of a GPU with ``total`` bytes, and the pids that have some; none if
    there is no account yet.
    """
    folder = Path(os.environ.get("PHOS_SOFTGPU_DIR") or _FOLDER)
    records = [*_RECORD.iter_unpack(_content(folder / f"gpu{ordinal}"))]
    living = _living() if records else {}
    theirs = [record for record in records if record[2] in living]
    sizes = {inode: size for inode, size, *_ in theirs}
    pids = {living[token] for _, _, token, *_ in theirs}
    return min(sum(sizes.values()), total), tuple(sorted(pids - {0}))


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


def _living() -> dict[int, int]:
    """Return the processes with a software GPU by their tokens: each listens on a socket that has
    its pid and token in its name. A pid is 0 if it cannot be told, as it has ended since.
    """
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    found = {}
    for words in map(str.split, lines):
        name = _NAME.fullmatch(words[-1])
        if name is not None:
            found[int(name[2], 16)] = _holder(int(name[1]), f"socket:[{words[-2]}]")
    return found


def _holder(own: int, socket: str) -> int:
    """Return the process that has this pid for itself, and this socket."""
    if _has(own, socket):
        return own
    for pid in procfs.pids():
        with contextlib.suppress(OSError):  # it has ended
            if pid_namespaces.is_nested(pid) and procfs.own_id(pid) == own and _has(pid, socket):
                return pid
    return 0


def _has(pid: int, socket: str) -> bool:
    with contextlib.suppress(OSError):
        folder = procfs.PROC / str(pid) / "fd"
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):  # just closed
                if str(entry.readlink()) == socket:
                    return True
    return False
