"""Find and remove the folders with output of programs that ended long ago.

Only the file worker's process does this, with the rights of their owner.
"""

import os
import re
import stat
from collections.abc import Iterator

from phosd.engine.criu.files.file_orders import Output, Outputs

_OUTPUT = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
"""The form of the folder names that ``phos run`` creates."""


def _names(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def found(wanted: Outputs) -> Iterator[Output]:
    """Yield the user's own old folders; remove them if ordered."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        runs = os.open(wanted.folder, flags)
    except FileNotFoundError:
        return
    for name in wanted.remove or sorted(_names(runs)):
        if not _OUTPUT.fullmatch(name):
            continue
        try:
            folder = os.open(name, flags, dir_fd=runs)
        except OSError:  # a link, or it no longer exists
            continue
        try:
            files = _names(folder)
            known = [os.stat(file, dir_fd=folder, follow_symlinks=False) for file in files]
            itself = os.fstat(folder)
            plain = all(stat.S_ISREG(status.st_mode) for status in known)
            written = max(status.st_mtime for status in (itself, *known))
            if not plain or itself.st_uid != os.geteuid() or written >= wanted.before:
                continue
            if wanted.remove:
                for file in files:
                    os.unlink(file, dir_fd=folder)
                os.rmdir(name, dir_fd=runs)
            yield Output(name, sum(status.st_size for status in known), written)
        except OSError:  # it is in use; a later call may succeed
            continue
        finally:
            os.close(folder)
