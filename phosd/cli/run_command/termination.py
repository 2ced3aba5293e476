"""Hold SIGTERM back from a program until it is saved: the side of ``phos run``.

The other side is in each process of the program (``phosd/term_hook/term.cpp``). They meet in the
folder of the program's output: a process that holds a signal back writes its pid to the file
``held``, and holds none unless the file ``relay`` is locked.
"""

import ctypes
import fcntl
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Self

from phosd.engine.program.tree import scan
from phosd.engine.system import pid_namespaces, procfs
from phosd.errors import NoSuchProcess

VARIABLE = "PHOS_TERM_DIR"
_DELIVER = 0x50485401
_DELIVER_IF_HELD = 0x50485402
_MOST_BYTES = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class TermHolder:
    """Make the processes of a program hold SIGTERM while this context lasts.

    Raises :class:`BlockingIOError` if another relay does so.
    """

    ROOT = "PHOS_TERM_ROOT"
    """The variable that the first process of a program sets for those below it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = 0
        self._lock = -1
        self._held = -1

    def __enter__(self) -> Self:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(self._folder / "relay", flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._held = os.open(self._folder / "held", flags | os.O_TRUNC, 0o600)
        except OSError:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._held)
        os.close(self._lock)

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which the program's processes find this one."""
        return {VARIABLE: str(self._folder.absolute())}

    def newly_held(self, root: int) -> list[int]:
        """Return the pids of processes that have begun to hold a SIGTERM since the last call, of
        the program below ``root``.
        """
        text = os.pread(self._held, _MOST_BYTES, self._read)
        text = text[: text.rfind(b"\n") + 1]
        self._read += len(text)
        own = [int(line) for line in text.split() if line.isdigit()]
        if not own or not _is_nested(root):
            return own
        ids = _tree_ids(root)  # they write what they know themselves by
        return [ids[pid] for pid in own if pid in ids]


def _is_nested(pid: int) -> bool:
    with suppress(OSError):  # it has ended
        return pid_namespaces.is_nested(pid)
    return False


def _tree_ids(root: int) -> dict[int, int]:
    try:
        return scan(root).ids
    except NoSuchProcess:
        return {}


def deliver(root: int) -> None:
    """Let SIGTERM come to the first process of a program, and to the others that hold one."""
    try:
        tree = [process.pid for process in scan(root).living]
    except NoSuchProcess:
        return
    for pid in tree:
        if pid != root:
            deliver_if_held(pid)
    _queue(root, _DELIVER)


def deliver_if_held(pid: int) -> None:
    """Let SIGTERM come to a process that holds one."""
    if _holds_signals(pid):
        _queue(pid, _DELIVER_IF_HELD)


def not_holding(root: int) -> list[str]:
    """Describe the processes of a program that cannot hold a SIGTERM: they are not dynamically
    linked, or do without the library.
    """
    try:
        living = [process.pid for process in scan(root).living]
    except NoSuchProcess:
        return []
    return [procfs.describe(pid) for pid in living if not _holds_signals(pid)]


def _holds_signals(pid: int) -> bool:
    """Return whether the library is in the process: in any other the signal would be an order."""
    with suppress(OSError):
        return "/libphos_term" in Path(f"/proc/{pid}/maps").read_text()
    return False


class _Value(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("pointer", ctypes.c_void_p))


_libc.sigqueue.argtypes = (ctypes.c_int, ctypes.c_int, _Value)


def _queue(pid: int, value: int) -> None:
    if _libc.sigqueue(pid, signal.SIGTERM, _Value(number=value)) != 0:
        error = ctypes.get_errno()
        with suppress(ProcessLookupError):
            raise OSError(error, os.strerror(error))
