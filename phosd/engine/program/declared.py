"""Which files belong to a program, open or not: it was started with them (``phos run
--keep-files``), it says so itself (``phosd.program.keep_files``), or the administrator has said so
for its user (``[[files]]``).
"""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from phosd.engine.system import pid_namespaces, procfs
from phosd.engine.system.file_status import known_status, open_wanted
from phosd.engine.system.variables import variable

KEEP_FILES = "PHOS_KEEP_FILES"
"""The variable of a program with the folders, files and patterns, as ``PATH`` has folders."""
_MOST = 64
"""Entries that count, in all."""
_TOLD = "/memfd:phos-keep-files (deleted)"
"""The file in memory in which a process says it: each name ends with a zero byte. It comes back
with the process.
"""
_MOST_TOLD = 64 << 10


KeptFiles = Sequence[tuple[int | None, str]]
"""Folders, files and patterns, each with the user id to whose programs it belongs; None: to those
of all users.
"""


def declared_patterns(
    pids: Sequence[int], uid: int, kept: KeptFiles = (), runtime_dir: Path | None = None
) -> tuple[str, ...]:
    """Return what a program of user ``uid`` has declared, whose processes are ``pids``, its root
    first, and what is ``kept`` of that user's programs; nothing for one that sees other files than
    we. Those in pid namespaces that phosd has made, whose records are in ``runtime_dir``, see ours.
    """
    pid = pids[0]
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        made = runtime_dir and pid_namespaces.made_for(runtime_dir, pid)
        if not made and procfs.namespace(pid, "mnt") != procfs.namespace(os.getpid(), "mnt"):
            return ()
        value = os.fsdecode(variable(pid, KEEP_FILES) or b"")
        wanted = [path for user, path in kept if user in (None, uid)]
        said = [*value.split(os.pathsep), *(path for each in pids for path in _told(each))]
        wanted += filter(os.path.isabs, said)
        return tuple(dict.fromkeys(wanted))[:_MOST]
    return ()


def _told(pid: int) -> Iterator[str]:
    """Yield what a process says itself."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for link in (procfs.PROC / str(pid) / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed
                if str(link.readlink()) == _TOLD:
                    yield from map(os.fsdecode, _contents(link).split(b"\0")[:-1])


def _contents(link: Path) -> bytes:
    descriptor = open_wanted(link, _is_told, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.pread(descriptor, _MOST_TOLD, 0)
    finally:
        os.close(descriptor)


def _is_told(place: str) -> bool:
    return str(Path(place).readlink()) == _TOLD and stat.S_ISREG(known_status(place).st_mode)
