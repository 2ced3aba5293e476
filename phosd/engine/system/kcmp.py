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
    return order(first, second, pid) == 0


def same_open_file(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Return whether two descriptors of other processes, as pid and number, are the same open file.

    Both may have closed theirs meanwhile.
    """
    return _order(first, second, may_be_gone=True) == 0


def order(first: int, second: int, pid: int | None = None) -> int | None:
    """Return 0 if two descriptors, as of :func:`same_file`, are the same open file; otherwise a
    number below or above 0, by the order that the kernel has for them; None: it was closed.
    """
    me = os.getpid()
    return _order((me, first), (me if pid is None else pid, second), may_be_gone=pid is not None)


def _order(first: tuple[int, int], second: tuple[int, int], *, may_be_gone: bool) -> int | None:
    (one, number), (other, number_of_other) = first, second
    answer: int = _libc().syscall(_KCMP, one, other, _KCMP_FILE, number, number_of_other)
    if answer < 0:
        code = ctypes.get_errno()
        if may_be_gone and code in (errno.EBADF, errno.ESRCH):
            return None
        raise Internal(
            f"comparing two descriptors failed ({os.strerror(code)})",
            hint="the kernel needs CONFIG_KCMP" if code == errno.ENOSYS else "run phosd as root",
        )
    return {1: -1, 2: 1}.get(answer, answer)  # less and greater


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
