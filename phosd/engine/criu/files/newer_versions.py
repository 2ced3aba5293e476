"""Find and remove what restores have left beside a program's files.

Only the file worker's process does this, with the rights of the files' owner.
"""

import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator
from pathlib import PurePath

from phosd.engine.criu.files.file_comparison import NEWER, TAIL
from phosd.engine.criu.files.file_orders import Version, Versions

_BESIDE = re.compile(f"(.+)(?:{re.escape(NEWER)}|{re.escape(TAIL)})[0-9a-z]+", re.DOTALL)
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK = 512


def found(wanted: Versions) -> Iterator[Version]:
    """Yield the owner's own versions of the files; remove them if ordered."""
    names = defaultdict(set)
    for path in map(PurePath, wanted.files):
        names[str(path.parent)].add(path.name)
    remove = set(wanted.remove)
    for folder, files in sorted(names.items()):
        try:
            opened = os.open(folder, _FLAGS)
        except OSError:  # it has gone, or is not theirs to look into
            continue
        try:
            for each in _in_folder(opened, folder, files, wanted.before):
                if not remove:
                    yield each
                elif each.path in remove:
                    os.unlink(PurePath(each.path).name, dir_fd=opened)
                    yield each
        except OSError:  # what could not be removed is there in a later call
            continue
        finally:
            os.close(opened)


def _in_folder(opened: int, folder: str, files: set[str], before: float) -> Iterator[Version]:
    for name in sorted(os.listdir(opened)):
        beside = _BESIDE.fullmatch(name)
        if beside is None or beside[1] not in files:
            continue
        try:
            status = os.stat(name, dir_fd=opened, follow_symlinks=False)
        except FileNotFoundError:
            continue
        # When it was left: a rename sets the time of its inode, which nobody can set back.
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if own and status.st_ctime < before:
            path, file = (str(PurePath(folder, each)) for each in (name, beside[1]))
            yield Version(path, file, status.st_blocks * _BLOCK, status.st_ctime)
