"""Find and remove what restores have left beside a program's files.

Only the file worker's process does this, with the rights of the files' owner.
"""

import glob
import os
import re
import shutil
import stat
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import PurePath

from phosd.engine.criu.files.file_orders import Version, Versions
from phosd.engine.criu.files.names_beside import NEWER, TAIL

_BESIDE = re.compile(f"(.+)(?:{re.escape(NEWER)}|{re.escape(TAIL)})[0-9a-z]+", re.DOTALL)
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK = 512


def found(wanted: Versions) -> Iterator[Version]:
    """Yield the owner's own versions of the files; remove them if ordered."""
    remove = set(wanted.remove)
    for folder, patterns in sorted(_by_folder(wanted).items()):
        try:
            opened = os.open(folder, _FLAGS)
        except OSError:  # it has gone, or is not theirs to look into
            continue
        try:
            for each in _in_folder(opened, folder, patterns, wanted.before):
                if not remove:
                    yield each
                elif each.path in remove:
                    _remove(PurePath(each.path).name, opened)
                    yield each
        except OSError:  # what could not be removed is there in a later call
            continue
        finally:
            os.close(opened)


def _by_folder(wanted: Versions) -> dict[str, set[str]]:
    """Return, for each folder, patterns of the names beside which there may be something."""
    found = defaultdict[str, set[str]](set)
    for path in map(PurePath, wanted.files):
        found[str(path.parent)].add(glob.escape(path.name))
    for path in map(PurePath, wanted.patterns):
        found[str(path.parent)].add(path.name)
    for folder in wanted.folders:
        found[folder].add("*")
    return found


def _in_folder(opened: int, folder: str, patterns: set[str], before: float) -> Iterator[Version]:
    """Yield what is beside names that one of the ``patterns`` stands for."""
    for name in sorted(os.listdir(opened)):
        beside = _BESIDE.fullmatch(name)
        if beside is None or not any(fnmatchcase(beside[1], each) for each in patterns):
            continue
        try:
            status = os.stat(name, dir_fd=opened, follow_symlinks=False)
        except FileNotFoundError:
            continue
        # When it was left: a rename sets the time of its inode, which nobody can set back.
        kind = stat.S_IFMT(status.st_mode)
        if status.st_uid != os.geteuid() or kind not in (stat.S_IFREG, stat.S_IFLNK, stat.S_IFDIR):
            continue
        if status.st_ctime < before:
            path, file = (str(PurePath(folder, each)) for each in (name, beside[1]))
            size = status.st_blocks * _BLOCK
            if kind == stat.S_IFDIR:
                size += _size(name, opened)
            yield Version(path, file, size, status.st_ctime)


def _size(name: str, opened: int) -> int:
    """Return the bytes on the disk of what is in a folder."""
    blocks = 0
    for _, folders, files, inside in os.fwalk(name, dir_fd=opened):
        for each in (*folders, *files):
            with suppress(FileNotFoundError):
                blocks += os.stat(each, dir_fd=inside, follow_symlinks=False).st_blocks
    return blocks * _BLOCK


def _remove(name: str, opened: int) -> None:
    if stat.S_ISDIR(os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode):
        shutil.rmtree(name, dir_fd=opened)
    else:
        os.unlink(name, dir_fd=opened)
