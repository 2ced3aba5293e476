"""Which files belong to a program, open or not: it was started with them (``phos run
--keep-files``), or the administrator has said so for its user (``[[files]]``).
"""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from phosd.engine.system import pid_namespaces, procfs
from phosd.engine.system.variables import variable

KEEP_FILES = "PHOS_KEEP_FILES"
"""The variable of a program with the folders, files and patterns, as ``PATH`` has folders."""
_MOST = 64
"""Entries of the variable that count."""


KeptFiles = Sequence[tuple[int | None, str]]
"""Folders, files and patterns, each with the user id to whose programs it belongs; None: to those
of all users.
"""


def declared_patterns(
    pid: int, uid: int, kept: KeptFiles = (), runtime_dir: Path | None = None
) -> tuple[str, ...]:
    """Return what the program of user ``uid`` has declared, and what is ``kept`` of that user's
    programs; nothing for one that sees other files than we. Those in pid namespaces that phosd has
    made, whose records are in ``runtime_dir``, see ours.
    """
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        made = runtime_dir and pid_namespaces.made_for(runtime_dir, pid)
        if not made and procfs.namespace(pid, "mnt") != procfs.namespace(os.getpid(), "mnt"):
            return ()
        value = os.fsdecode(variable(pid, KEEP_FILES) or b"")
        wanted = [path for user, path in kept if user in (None, uid)]
        wanted += filter(os.path.isabs, value.split(os.pathsep))
        return tuple(dict.fromkeys(wanted))[:_MOST]
    return ()
