"""Remove output folders of ``phos run`` that no image and no process needs any more."""

import contextlib
from collections.abc import Collection, Iterable
from pathlib import Path

from phosd.engine.criu import file_worker
from phosd.engine.criu.file_worker import Orders, Outputs
from phosd.engine.image.manifest import Manifest
from phosd.engine.system import procfs


def remove_unneeded(
    folder: Path,
    owner: tuple[int, int, tuple[int, ...]],
    images: Iterable[Manifest],
    before: float,
) -> list[str]:
    """Remove the folders in ``folder`` that are not needed; return their names.

    A folder is removed if it was not written to since ``before`` (seconds since the epoch), no
    process has it open, and none of ``images`` names it. ``owner`` is the user id, group id and
    groups to act as, because the user can change the path. Raises :class:`Internal` if that fails,
    :class:`Timeout` if the user's file system does not answer, and :class:`OSError` if the open
    files of processes cannot be read.
    """
    uid, gid, groups = owner
    orders = Orders(uid, gid, groups, mark="", outputs=Outputs(str(folder), before))
    old = file_worker.work(orders, file_worker.IMPATIENCE).outputs
    if not old:
        return []
    needed = _named(images) | _open(old, uid)
    gone = tuple(name for name in old if name not in needed)
    if not gone:
        return []
    outputs = Outputs(str(folder), before, remove=gone)
    orders = Orders(uid, gid, groups, mark="", outputs=outputs)
    return list(file_worker.work(orders, file_worker.IMPATIENCE).outputs)


def _named(images: Iterable[Manifest]) -> set[str]:
    """Return every part of a path that a restore would open. Names of folders are never reused."""
    return {
        part
        for image in images
        for tree in image.trees
        if tree.details is not None
        for files in (tree.details.open_files, tree.details.memory_files, tree.details.mapped_files)
        for file in files
        for part in Path(file.path).parts
    }


def _open(names: Collection[str], owner: int) -> set[str]:
    """Return the folders in which a process has a file open, or its working directory.

    Raises :class:`OSError` if a process of the owner cannot be read; phosd as a service can read
    all.
    """
    wanted = set(names)
    found: set[str] = set()
    for entry in procfs.PROC.iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            for link in (entry / "cwd", *(entry / "fd").iterdir()):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    found |= wanted & set(link.readlink().parts)
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if owner in procfs.status(int(entry.name)).uids:
                    raise
    return found
