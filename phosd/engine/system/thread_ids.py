"""Act as another user in one thread of ours, without root's rights.

In a user namespace that does not know root, root may make no file, and whoever asks who has
connected is not told that it was root.
"""

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from phosd.engine.system.procfs import Status

_SETRESUID, _SETRESGID = 117, 119  # x86-64; libc's functions would change all threads
_AS_IT_IS = -1


def as_owner(owner: Status) -> AbstractContextManager[None]:
    """Let this thread have the effective ids of a process inside the context. Needs root."""
    return as_user(owner.uids[1], owner.gids[1])


@contextmanager
def as_user(uid: int, gid: int) -> Iterator[None]:
    """Let this thread have these effective ids inside the context. Needs root.

    Its real and saved ids stay root's: the user may neither signal nor trace it.
    """
    group = os.getegid()
    _set(_SETRESGID, gid)
    try:
        _set(_SETRESUID, uid)
        try:
            yield
        finally:
            _set(_SETRESUID, 0)
    finally:
        _set(_SETRESGID, group)


def _set(call: int, effective: int) -> None:
    if _libc().syscall(call, _AS_IT_IS, ctypes.c_uint32(effective), _AS_IT_IS) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), f"effective id {effective}")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
