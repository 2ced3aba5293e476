"""Remove output folders of ``phos run`` that no image and no process needs any more."""

import contextlib
from collections.abc import Collection, Iterable
from pathlib import Path

from phosd.engine.criu.files import file_worker
from phosd.engine.criu.files.file_worker import Orders, Output, Outputs
from phosd.engine.image.manifest import Manifest
from phosd.engine.system import procfs
from phosd.errors import Reason, Unsupported

_INIT = "1"
"""The pid of a process that a security module may close to all. It is no program of `phos run`."""
Owner = tuple[int, int, tuple[int, ...]]
"""The user id, group id and groups to act as, because the user can change every path."""


def unneeded(folder: Path, owner: Owner, images: Iterable[Manifest], before: float) -> list[Output]:
    """Return the owner's folders in ``folder`` that are not needed, by name.

    A folder is needed if it was written to since ``before`` (seconds since the epoch), a process
    has it open, or one of ``images`` names it. Raises :class:`Unsupported` if the owner cannot look
    into ``folder``, :class:`Internal` if the work fails,
    :class:`Timeout` if the user's file system does not answer, and :class:`OSError` if the open
    files of processes cannot be read.
    """
    old = _work(owner, Outputs(str(folder), before))
    if not old:
        return []
    needed = _named(images) | _open({each.name for each in old}, owner[0])
    return [each for each in old if each.name not in needed]


def remove_unneeded(
    folder: Path,
    owner: Owner,
    images: Iterable[Manifest],
    before: float,
    names: Collection[str] | None = None,
) -> list[str]:
    """Remove the folders that are not needed, only those in ``names`` if they are given, and return
    their names. Raises as :func:`unneeded`.
    """
    found = unneeded(folder, owner, images, before)
    gone = tuple(each.name for each in found if names is None or each.name in names)
    if not gone:
        return []
    return [each.name for each in _work(owner, Outputs(str(folder), before, remove=gone))]


def _work(owner: Owner, outputs: Outputs) -> tuple[Output, ...]:
    uid, gid, groups = owner
    orders = Orders(uid, gid, groups, mark="", outputs=outputs)
    answer = file_worker.work(orders, file_worker.SHORT_TIMEOUT)
    if answer.problems:
        raise Unsupported(
            f"the output folders cannot be looked at: {answer.problems[0]}",
            hint="name the folder in which `phos run` keeps them, as its owner",
            reason=Reason.OUTPUT_FOLDER,
        )
    return answer.outputs


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
            if entry.name == _INIT:
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if owner in procfs.status(int(entry.name)).uids:
                    raise
    return found
