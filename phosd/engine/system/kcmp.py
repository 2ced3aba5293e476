"""Compare descriptors, perhaps of two processes: are they the same open file?"""

import ctypes
import errno
import functools
import os

from phosd.errors import Internal

_KCMP, _KCMP_FILE = 312, 0  # x86-64


def same_file(first: int, second: int, pid: int | None = None) -> bool:
    """Return whether two descriptors are the same open file (``kcmp``).

    ``first`` belongs to this process; ``second`` to this one, too, or to ``pid``, which may have
    closed it meanwhile.
    """
    me = os.getpid()
    other = me if pid is None else pid
    answer: int = _libc().syscall(_KCMP, me, other, _KCMP_FILE, first, second)
    if answer < 0:
        code = ctypes.get_errno()
        if pid is not None and code in (errno.EBADF, errno.ESRCH):
            return False
        raise Internal(
            f"comparing two descriptors failed ({os.strerror(code)})",
            hint="the kernel needs CONFIG_KCMP" if code == errno.ENOSYS else "run phosd as root",
        )
    return answer == 0


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
