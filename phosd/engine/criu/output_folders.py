"""The folders that ``phos run`` made for programs' output, and that nobody needs any more."""

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
    """Remove what lies in ``folder``, was not written to since ``before`` (seconds since the
    epoch), is open in no process, and is named by none of ``images``; the names of what went.

    ``owner`` are the user id, the group id and the groups that it is done with: the path is the
    user's to change. Raises :class:`Internal` when that fails, :class:`OSError` when it cannot be
    told what processes have open.
    """
    uid, gid, groups = owner
    orders = Orders(uid, gid, groups, mark="", outputs=Outputs(str(folder), before))
    old = file_worker.work(orders).outputs
    if not old:
        return []
    needed = _named(images) | _open(old, uid)
    gone = tuple(name for name in old if name not in needed)
    if not gone:
        return []
    outputs = Outputs(str(folder), before, remove=gone)
    return list(file_worker.work(Orders(uid, gid, groups, mark="", outputs=outputs)).outputs)


def _named(images: Iterable[Manifest]) -> set[str]:
    """Every part of a path that a restore would open. A folder's name is never given twice."""
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
    """Those of the folders of which some process has something open, or where it works.

    Raises :class:`OSError` when a process of the owner cannot be asked; phosd as a service may ask
    all of them.
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
