"""Stop single threads of other processes, as a debugger does.

A thread is traced by a thread, not by a process: all calls about one must come from the same thread
of phosd. What is still traced when that thread ends runs on.
"""

import ctypes
import os
import signal
from dataclasses import dataclass
from enum import IntEnum

WALL = 0x40000000
"""``__WALL`` of waitpid(2): wait for threads, too."""

_EVENT_CLONE = 3
_EVENT_STOP = 128
_TRACE_CLONE = 1 << _EVENT_CLONE


class _Request(IntEnum):
    CONT = 7
    DETACH = 17
    GETEVENTMSG = 0x4201
    SEIZE = 0x4206
    INTERRUPT = 0x4207


@dataclass(frozen=True)
class Stop:
    """Why a thread has stopped. ``signal`` is what it has met, and is to meet when it runs on;
    mostly 0. ``started`` is a thread that it has started, which is traced as it is.
    """

    signal: int = 0
    group_stop: bool = False
    started: int | None = None


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def seize(thread: int, *, clones: bool = False) -> None:
    """Trace ``thread``, which runs on unless it has stopped; with the threads that it starts, if
    ``clones``.

    Raises :class:`ProcessLookupError` if it has ended, and :class:`PermissionError` if it is traced
    already.
    """
    _call(_Request.SEIZE, thread, _TRACE_CLONE if clones else 0)


def interrupt(thread: int) -> None:
    """Stop ``thread``, which is traced; :func:`stopped` tells when it has.

    Raises :class:`ProcessLookupError` if it has ended.
    """
    _call(_Request.INTERRUPT, thread)


def stopped(thread: int) -> Stop | None:
    """Return why ``thread`` has stopped; None if it has not since it was let run.

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
    met, event = os.WSTOPSIG(status), status >> 16
    if event == _EVENT_CLONE:
        new = ctypes.c_ulong()
        _call(_Request.GETEVENTMSG, thread, ctypes.addressof(new))
        return Stop(started=new.value)
    if event == _EVENT_STOP:  # SIGTRAP if a tracer's request is the reason
        return Stop(group_stop=met != signal.SIGTRAP)
    return Stop(met)


def let_run(thread: int, met: int = 0) -> None:
    """Let ``thread``, which has stopped, run on with a signal, also out of a group stop.

    It stays traced. Raises :class:`ProcessLookupError` if it has ended.
    """
    _call(_Request.CONT, thread, met)


def detach(thread: int, met: int) -> None:
    """Trace ``thread``, which has stopped, no more: with the signal that it has met it runs on, or
    takes part in a group stop.

    Raises :class:`ProcessLookupError` if it has ended.
    """
    _call(_Request.DETACH, thread, met)


def _call(request: _Request, thread: int, data: int = 0) -> None:
    if _libc.ptrace(request, thread, None, data) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"cannot {request.name.lower()} thread {thread}")
