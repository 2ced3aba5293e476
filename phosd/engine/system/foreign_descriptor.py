"""Duplicate a descriptor of another process (``pidfd_getfd(2)``)."""

import ctypes
import functools
import os

_PIDFD_GETFD = 438


def duplicate(pid: int, number: int) -> int:
    """Return a descriptor of ours for the file that ``pid`` has open as ``number``.

    Raises :class:`OSError` if there is none, or :class:`ProcessLookupError`.
    """
    process = os.pidfd_open(pid)
    try:
        found: int = _libc().syscall(_PIDFD_GETFD, process, number, 0)
    finally:
        os.close(process)
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
