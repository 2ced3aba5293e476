"""Shared memory that was opened under a name that is gone, while its file has another.

So glibc makes a semaphore (``sem_open(3)``): as a file with a random name, which it links to the
right one and removes. For such a file CRIU makes a link ``link_remap.N`` beside it, which its
restore opens; but it removes the link at once if the program goes on. Here the image is changed to
open the file by the name that it has; its bytes are saved like those of other files in memory, and
links that are left are removed.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from phosd.engine.criu.files import file_worker
from phosd.engine.criu.files.file_worker import Change, Orders
from phosd.engine.criu.images.fields import FileEntry, RegFileEntry, RemapFilePathEntry, RemapType
from phosd.engine.criu.images.image_file import ImageFile, fields, message, strange, with_bytes
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.system import procfs

FOLDER = Path("/dev/shm")
"""Where POSIX semaphores and shared memory are (``shm_overview(7)``). It belongs to root."""
DELETED = " (deleted)"

_LINK = re.compile(r"link_remap\.\d+")

_Inode = tuple[int, int]
"""Device and number."""


def names(mappings: Iterable[procfs.Mapping]) -> dict[str, str]:
    """Return the name that each such file has, by the path with which it is mapped."""
    wanted = _without_name(mappings)
    if not wanted:
        return {}
    there = {inode: path for path, inode in _entries() if not _LINK.fullmatch(Path(path).name)}
    return {
        path: there[inode]
        for path, inodes in wanted.items()
        # CRIU's images do not tell two files apart that had the same name.
        if len(inodes) == 1 and (inode := next(iter(inodes))) in there
    }


def remove_stale_links(mappings: Iterable[procfs.Mapping], owner: Owner) -> None:
    """Remove CRIU's links to such files. A dump that was killed left them, and the next fails on
    them.
    """
    inodes = {inode for each in _without_name(mappings).values() for inode in each}
    if inodes:
        links = [path for path, inode in _entries() if inode in inodes]
        _remove([path for path in links if _LINK.fullmatch(Path(path).name)], owner)


def relink(folder: Path, names: Mapping[str, str], owner: Owner) -> None:
    """Make the images in ``folder`` open the files by their ``names``, and remove CRIU's links.

    Raises :class:`~phosd.errors.Internal` if they are not CRIU's.
    """
    if not names:
        return
    remaps_path, files_path = folder / "remap-fpath.img", folder / "files.img"
    remaps, files = ImageFile.read(remaps_path), ImageFile.read(files_path)
    try:
        paths = dict(_paths(files))
        linked = dict(_linked(remaps))
        renamed = {
            original: names[path + DELETED]
            for original in linked
            if (path := paths.get(original, "")) + DELETED in names
        }
        ours = {linked[original] for original in renamed}
        kept = [
            each
            for each in remaps.messages
            if _number(each, RemapFilePathEntry.ORIG_ID) not in renamed
        ]
        needed = (each for each in files.messages if _number(each, FileEntry.ID) not in ours)
        opened = [_renamed(each, renamed) for each in needed]
    except ValueError as error:
        raise strange(files_path) from error
    ImageFile(remaps.magic, tuple(kept)).write(remaps_path)
    ImageFile(files.magic, tuple(opened)).write(files_path)
    links = {Path(path) for number in ours if (path := paths.get(number, ""))}
    _remove([str(each) for each in sorted(links) if _is_left(each)], owner)


def _is_left(link: Path) -> bool:
    return link.parent == FOLDER and bool(_LINK.fullmatch(link.name)) and link.exists()


def _without_name(mappings: Iterable[procfs.Mapping]) -> dict[str, set[_Inode]]:
    """Return the files in the folder that were opened under a name that is gone."""
    found: dict[str, set[_Inode]] = {}
    for mapping in mappings:
        path = Path(mapping.path)
        if mapping.shared and path.parent == FOLDER and path.name.endswith(DELETED):
            found.setdefault(mapping.path, set()).add((mapping.device, mapping.inode))
    return found


def _entries() -> Iterator[tuple[str, _Inode]]:
    with os.scandir(FOLDER) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                yield entry.path, (status.st_dev, status.st_ino)


def _remove(links: Collection[str], owner: Owner) -> None:
    """Remove links with the rights of their owner, who may have put anything in their place."""
    if links:
        changes = tuple(Change(path, "") for path in links)
        file_worker.work(Orders(owner.uid, owner.gid, owner.groups, mark="", undo=changes))


def _paths(files: ImageFile) -> Iterator[tuple[int, str]]:
    """Yield the ids and paths of regular files."""
    for each in files.messages:
        for field in fields(each):
            if field.number == FileEntry.REG and isinstance(field.value, bytes):
                name = {field.number: field.value for field in fields(field.value)}.get(
                    RegFileEntry.NAME, b""
                )
                if isinstance(name, bytes):
                    yield _number(each, FileEntry.ID), os.fsdecode(name)


def _linked(remaps: ImageFile) -> Iterator[tuple[int, int]]:
    """Yield the ids of the files that CRIU has linked, and those of the links."""
    for each in remaps.messages:
        if _number(each, RemapFilePathEntry.REMAP_TYPE) == RemapType.LINKED:
            yield (
                _number(each, RemapFilePathEntry.ORIG_ID),
                _number(each, RemapFilePathEntry.REMAP_ID),
            )


def _number(of: bytes, number: int) -> int:
    """Return the number in a field; 0 without it."""
    value = {field.number: field.value for field in fields(of)}.get(number, 0)
    return value if isinstance(value, int) else 0


def _renamed(file: bytes, names: Mapping[int, str]) -> bytes:
    """Return the entry of a file with the name that is given for its id, if one is."""
    name = names.get(_number(file, FileEntry.ID))
    if name is None:
        return file
    opened = partial(with_bytes, RegFileEntry.NAME, lambda _: os.fsencode(name))
    return message(
        with_bytes(FileEntry.REG, lambda entry: message(opened(fields(entry))), fields(file))
    )
