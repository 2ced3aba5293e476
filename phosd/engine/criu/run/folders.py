"""The folders that CRIU works in: private to root, and lent to a program's owner for a while."""

import contextlib
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from phosd.engine.criu.run.invocation import Owner
from phosd.engine.image.cpu_manifest import WRITTEN
from phosd.engine.system.removal import remove_trees
from phosd.errors import Internal

_Inode: TypeAlias = tuple[int, int]
"""The numbers of a file's device and of itself."""
_lent = Counter[_Inode]()
"""How many restores read each file that is lent to a group."""
_lending = threading.Lock()


def require_private(folder: Path) -> None:
    """Raise :class:`Internal` unless one of the folders above ``folder`` is open to root alone."""
    for parent in folder.resolve().parents:
        status = parent.stat()
        if status.st_uid == 0 and status.st_mode & 0o077 == 0:
            return
    raise Internal(
        f"{folder} can be reached by every user", hint="its parent must belong to root, mode 0700"
    )


@contextlib.contextmanager
def working_folder(folder: Path, owner: Owner) -> Iterator[Path]:
    """Create a folder beside ``folder`` for CRIU's log, which ``owner`` may write to."""
    work = Path(tempfile.mkdtemp(prefix="criu-", dir=folder.parent))
    try:
        os.chown(work, owner.uid, owner.gid)
        yield work
    finally:
        remove_trees([work])


@contextlib.contextmanager
def lent(folder: Path, owner: Owner) -> Iterator[None]:
    """Give ``folder`` to ``owner`` inside the context, and then to root alone with all files."""
    require_private(folder)
    os.chown(folder, owner.uid, owner.gid)
    try:
        yield
    finally:
        folder.chmod(0o700)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 0, 0, follow_symlinks=False)
            if path.is_file() and not path.is_symlink():
                path.chmod(0o600)


@contextlib.contextmanager
def readable(folder: Path, owner: Owner) -> Iterator[None]:
    """Let the owner's group read the folder's files; CRIU gets the folder as a descriptor. Several
    restores of an image may have the same files, by links, and the last one closes each.
    """
    if owner.is_root:
        yield
        return
    inodes: list[_Inode] = []
    try:
        with _lending:
            for path in _of_criu(folder):
                inodes.append(_inode(path))
                _lent[inodes[-1]] += 1
                os.chown(path, 0, owner.gid, follow_symlinks=False)
                path.chmod(0o750 if path.is_dir() else 0o640)
        yield
    finally:
        with _lending:
            _lent.subtract(inodes)
            for inode in inodes:
                if not _lent[inode]:
                    del _lent[inode]
            close_to_others(folder)


def close_to_others(folder: Path) -> None:
    """Return an image's folder, which a restore lent to its owner's group, to root alone; but for
    files that another restore reads.
    """
    for path in (folder, *folder.rglob("*")):
        if _inode(path) not in _lent:
            path.chmod(0o700 if path.is_dir() else 0o600)
            os.chown(path, 0, 0, follow_symlinks=False)


def _inode(path: Path) -> _Inode:
    status = path.lstat()
    return status.st_dev, status.st_ino


def _of_criu(folder: Path) -> list[Path]:
    """Return an image's folder with what is in it, but for the program's own files: CRIU does not
    read them, and other images may have the same ones.
    """
    found = [folder]
    for path in folder.iterdir():
        if path.name != WRITTEN:
            inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
            found += [path, *inside]
    return found
