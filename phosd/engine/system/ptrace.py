"""Stop single threads of other processes, as a debugger does.

A thread is traced by a thread, not by a process: all calls about one must come from the same thread
of phosd. What is still traced when that thread ends runs on.
"""

import ctypes
import os
from enum import IntEnum

WALL = 0x40000000
"""``__WALL`` of waitpid(2): wait for threads, too."""

_EVENT_STOP = 128


class _Request(IntEnum):
    DETACH = 17
    SEIZE = 0x4206
    INTERRUPT = 0x4207


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def seize(thread: int) -> None:
    """Trace ``thread``, and have it stop; :func:`stopped` tells when it has.

    Raises :class:`ProcessLookupError` if it has ended, and :class:`PermissionError` if it is traced
    already.
    """
    _call(_Request.SEIZE, thread)
    _call(_Request.INTERRUPT, thread)


def stopped(thread: int) -> int | None:
    """Return whether ``thread`` has stopped: the signal that it has met, mostly 0; None if not yet.

    Raises :class:`ProcessLookupError` if it has ended.
    """
    try:
        found, status = os.waitpid(thread, os.WNOHANG | WALL)
    except ChildProcessError as error:
        raise ProcessLookupError(f"thread {thread} has ended") from error
    if not found:
        return None
    if not os.WIFSTOPPED(status):
        raise ProcessLookupError(f"thread {thread} has ended")
    return 0 if status >> 16 == _EVENT_STOP else os.WSTOPSIG(status)


def detach(thread: int, signal: int) -> None:
    """Let ``thread``, which has stopped, run on, with the signal that it has met.

    Raises :class:`ProcessLookupError` if it has ended.
    """
    _call(_Request.DETACH, thread, signal)


def _call(request: _Request, thread: int, data: int = 0) -> None:
    if _libc.ptrace(request, thread, None, data) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {request.name.lower()} thread {thread}")
