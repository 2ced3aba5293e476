"""Which files a program was started with as its own (``phos run --keep-files``)."""

import contextlib
import os

from phosd.engine.system import procfs
from phosd.engine.system.variables import variable

KEEP_FILES = "PHOS_KEEP_FILES"
"""The variable of a program with the folders, files and patterns, as ``PATH`` has folders."""
_MOST = 64
"""Entries of the variable that count."""


def declared_patterns(pid: int) -> tuple[str, ...]:
    """Return what the program has declared; nothing for one that sees other files than we."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        if procfs.namespace(pid, "mnt") != procfs.namespace(os.getpid(), "mnt"):
            return ()
        value = os.fsdecode(variable(pid, KEEP_FILES) or b"")
        wanted = filter(os.path.isabs, value.split(os.pathsep))
        return tuple(dict.fromkeys(wanted))[:_MOST]
    return ()
