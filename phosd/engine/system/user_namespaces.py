"""Read who a process is for itself in its user namespace, and who made that."""

import array
import fcntl
import os

from phosd.engine.system import procfs

_NS_GET_PARENT, _NS_GET_OWNER_UID = 0xB702, 0xB704  # ioctl_ns(2)


def own_user(pid: int) -> int:
    """Return the effective user of a process as it has it for itself, in its user namespace.

    Raises :class:`ProcessLookupError` or :class:`FileNotFoundError` if it has ended.
    """
    user = procfs.status(pid).uids[1]
    for line in procfs.lines(procfs.PROC / str(pid) / "uid_map"):
        inside, outside, count = map(int, line.split())
        if outside <= user < outside + count:
            return inside + user - outside
    return user


def made_its_users(pid: int) -> bool:
    """Return whether the effective user of a process is also who made its user namespace, and those
    above it below ours: not one of the many ids that such a namespace may have. True in ours.

    Raises :class:`OSError` if it has ended.
    """
    user, ours = procfs.status(pid).uids[1], (procfs.PROC / "self/ns/user").stat().st_ino
    here = os.open(procfs.PROC / str(pid) / "ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        while os.fstat(here).st_ino != ours:
            maker = array.array("I", (0,))
            fcntl.ioctl(here, _NS_GET_OWNER_UID, maker)
            if maker[0] != user:
                return False
            above = fcntl.ioctl(here, _NS_GET_PARENT)
            os.close(here)
            here = above
    finally:
        os.close(here)
    return True
