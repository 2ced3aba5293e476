"""Read which files a dump has, from CRIU's images: their paths, and what is special about some."""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from phosd.engine.criu.images.fields import (
    FdinfoEntry,
    FifoEntry,
    FileEntry,
    RegFileEntry,
    RemapFilePathEntry,
    RemapType,
    TaskKobjIdsEntry,
)
from phosd.engine.criu.images.image_file import ImageFile, fields, strange

Message = Mapping[int, Sequence[int | bytes]]
"""The values of a message's fields, by number."""


class SavedFiles:
    """The files that the images in ``folder`` have. Raises :class:`~phosd.errors.Internal` if they
    are not CRIU's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = list(messages(folder / "files.img"))
        self.paths = {
            number_in(entry, RegFileEntry.ID): os.fsdecode(text_in(entry, RegFileEntry.NAME))
            for entry in self.of(FileEntry.REG)
        }
        """The paths of regular files and named pipes, by the numbers of the files."""

    def of(self, number: int) -> Iterator[Message]:
        """Yield the entries of one kind of files, by the number of its field."""
        for each in self._files:
            for entry in each.get(number, ()):
                if isinstance(entry, bytes):
                    yield _read(entry)

    @cached_property
    def pipes(self) -> frozenset[int]:
        """The numbers of the files that are named pipes."""
        return frozenset(number_in(each, FifoEntry.REGF_ID) for each in self.of(FileEntry.FIFO))

    @cached_property
    def deleted(self) -> frozenset[int]:
        """The numbers of the files that were deleted, whose bytes are in the images."""
        return frozenset(self._remapped(RemapType.GHOST))

    def linked(self) -> list[str]:
        """Return the paths of deleted files of which there is a link that a restore removes."""
        return [self.paths.get(number, "") for number in self._remapped(RemapType.LINKED)]

    def _remapped(self, kind: int) -> Iterator[int]:
        path = self.folder / "remap-fpath.img"
        for each in messages(path) if path.exists() else ():
            if number_in(each, RemapFilePathEntry.REMAP_TYPE) == kind:
                yield number_in(each, RemapFilePathEntry.ORIG_ID)

    def path_of(self, pid: int, descriptor: int) -> str:
        """Return the path of what a process has open; empty if that has none."""
        ids = next(messages(self.folder / f"ids-{pid}.img"), {})
        for each in messages(
            self.folder / f"fdinfo-{number_in(ids, TaskKobjIdsEntry.FILES_ID)}.img"
        ):
            if number_in(each, FdinfoEntry.FD) == descriptor:
                return self.paths.get(number_in(each, FdinfoEntry.ID), "")
        return ""


def messages(path: Path) -> Iterator[Message]:
    """Yield the messages of an image. Raises :class:`~phosd.errors.Internal`."""
    try:
        for each in ImageFile.read(path).messages:
            yield _read(each)
    except ValueError as error:
        raise strange(path) from error


def _read(message: bytes) -> Message:
    found: defaultdict[int, list[int | bytes]] = defaultdict(list)
    for field in fields(message):
        found[field.number].append(field.value)
    return found


def number_in(entry: Message, number: int) -> int:
    """Return the first number in a field; 0 without one."""
    return next((each for each in entry.get(number, ()) if isinstance(each, int)), 0)


def text_in(entry: Message, number: int) -> bytes:
    """Return the first bytes in a field; none without any."""
    return next((each for each in entry.get(number, ()) if isinstance(each, bytes)), b"")
