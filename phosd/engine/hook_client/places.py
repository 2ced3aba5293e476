"""Where hooks listen: ``hook/<pid>.sock`` of the runtime folder.

A program in a pid namespace of its own sees another folder in its place, ``pidns-<inode>`` of this
one, and its processes are named by the pids that they have for themselves.
"""

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from phosd.engine.system import pid_namespaces, procfs

_PREFIX = "pidns-"


def hooks_folder(runtime_dir: Path) -> Path:
    """Return the folder of all hooks' sockets. Any user may write to it."""
    return runtime_dir / "hook"


def folder_in(runtime_dir: Path, namespace: int) -> Path:
    """Return the folder that stands for it in the pid namespace with this inode."""
    return hooks_folder(runtime_dir) / f"{_PREFIX}{namespace}"


def socket_path(runtime_dir: Path, pid: int) -> Path:
    """Return the path of the socket of the hook of ``pid``."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        if pid_namespaces.is_nested(pid):
            inode = (procfs.PROC / str(pid) / "ns/pid").stat().st_ino
            return folder_in(runtime_dir, inode) / f"{procfs.own_id(pid)}.sock"
    return hooks_folder(runtime_dir) / f"{pid}.sock"


def folders(runtime_dir: Path) -> Iterator[Path]:
    """Yield the folders in which hooks' sockets are."""
    hooks = hooks_folder(runtime_dir)
    yield hooks
    for folder, _ in _namespaces(hooks):
        yield folder


def listening(runtime_dir: Path) -> Iterator[int]:
    """Yield the processes for which a hook seems to listen."""
    hooks = hooks_folder(runtime_dir)
    yield from sorted(_pids(hooks))
    for folder, inode in _namespaces(hooks):
        if inside := [*_pids(folder)]:
            ids = pid_namespaces.members(f"pid:[{inode}]")
            yield from sorted(ids[pid] for pid in inside if pid in ids)


def sweep(runtime_dir: Path) -> None:
    """Remove what processes and namespaces have left that have ended, and ``.wake`` files.

    A stale ``.wake`` file would wake a hook in the middle of a dump.
    """
    hooks = hooks_folder(runtime_dir)
    _sweep(hooks, {pid: pid for pid in procfs.pids()})
    for folder, inode in _namespaces(hooks):
        ids = pid_namespaces.members(f"pid:[{inode}]")
        if ids:
            _sweep(folder, ids)
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(folder: Path, ids: dict[int, int]) -> None:
    for path in [*folder.glob("*.sock"), *folder.glob("*.wake")]:
        pid = path.stem
        with contextlib.suppress(OSError):  # a folder of this name, made by any user, is harmless
            found = path.lstat()
            dead = pid.isascii() and pid.isdecimal() and int(pid) not in ids
            if dead or (path.suffix == ".wake" and stat.S_ISREG(found.st_mode)):
                path.unlink()


def _pids(folder: Path) -> Iterator[int]:
    """Yield the pids after which sockets in a folder are named."""
    for path in folder.glob("*.sock"):
        if path.stem.isascii() and path.stem.isdecimal():
            yield int(path.stem)


def _namespaces(hooks: Path) -> Iterator[tuple[Path, int]]:
    for folder in hooks.glob(f"{_PREFIX}*"):
        inode = folder.name.removeprefix(_PREFIX)
        with contextlib.suppress(FileNotFoundError):
            status = folder.lstat()
            # Of root's own nobody else can put something else in its place.
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if ours and re.fullmatch("[0-9]{1,20}", inode):
                yield folder, int(inode)
