"""Rehearse a restore: have CRIU make a tree, of which nothing ever runs, and throw it away.

Everything is made in namespaces of its own (pid, mount, network, IPC), so ports and abstract names
of sockets are free. What else the program has open to write to is a path: files, named memory,
pipes and deleted files are replaced by empty ones of the same size in a folder of the rehearsal's,
and sockets with a path by abstract ones. Locks on files, which the original may have, are left out.
So nothing that the original has is touched. The fields are those of ``regfile.proto``,
``sk-unix.proto``, ``fifo.proto`` and ``remap-file-path.proto``.
"""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

from phosd.engine.criu.exclusive import LOCKS, OUTSIDE, Names
from phosd.engine.criu.image_file import Field, ImageFile
from phosd.engine.criu.private_copy import changed, private_copy
from phosd.engine.criu.program import Owner
from phosd.engine.criu.saved_tree import SavedTree
from phosd.errors import OutOfSpace, Reason, Unsupported

_FILE_REGULAR, _FILE_UNIX = 3, 16
_REGULAR_ID, _REGULAR_FLAGS, _REGULAR_NAME, _REGULAR_SIZE, _REGULAR_MODE = 1, 2, 6, 8, 10
_UNIX_ID, _UNIX_FLAGS, _UNIX_NAME = 1, 6, 11
_OF_A_PATH = (13, 14, 15)
"""A unix socket's permissions, folder, and whether its path was deleted."""
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_IN_MEMORY = "/dev/shm/"


class Rehearsal:
    """A rehearsal of ``tree``'s restore, with files in ``scratch``, a folder of root's."""

    def __init__(self, tree: SavedTree, scratch: Path) -> None:
        self.tree = tree
        self._scratch = scratch
        self._replaced: dict[bytes, bytes] = {}

    @cached_property
    def _names(self) -> Names:
        return Names(self.tree.folder)

    def require_possible(self) -> None:
        """Raise :class:`Unsupported` for what a restore uses up."""
        if links := self._names.linked():
            raise Unsupported(
                f"the program has {links[0]} open, which was deleted while it had another name: a "
                "restore uses up what was saved of that",
                hint="the image can be restored; only a rehearsal would leave it damaged",
                reason=Reason.PROCESS_STATE,
            )

    @contextmanager
    def private_copy(self) -> Iterator[SavedTree]:
        """Yield the tree with CRIU's files as the rehearsal needs them, and make what these name.

        The folder is the owner's then: nothing of root's is opened there.
        """
        owner = self.tree.user
        self._scratch.chmod(0o711)  # another one cannot list it
        files = self._scratch / "files"
        files.mkdir(mode=0o700)
        with private_copy(self.tree, partial(self._entry, files)) as copy:
            locks = copy.folder / LOCKS
            if locks.exists():
                ImageFile(ImageFile.read(locks).magic, ()).write(locks)
            os.chown(files, owner.uid, owner.gid)
            try:
                yield copy
            finally:
                os.chown(files, 0, 0)  # nobody adds to it while it is removed

    def _entry(self, files: Path, entry: list[Field]) -> Iterator[Field]:
        for field in entry:
            if field.number == _FILE_REGULAR and field.value:
                yield changed(field, partial(self._regular, files))
            elif field.number == _FILE_UNIX and field.value:
                yield changed(field, _unix)
            else:
                yield field

    def _regular(self, files: Path, entry: list[Field]) -> Iterable[Field]:
        values = {field.number: field.value for field in entry}
        path, number = values.get(_REGULAR_NAME), values.get(_REGULAR_ID)
        names = self._names
        flags, mode = _int(values.get(_REGULAR_FLAGS)), _int(values.get(_REGULAR_MODE))
        if not isinstance(path, bytes):
            return entry
        special = number in names.pipes or number in names.deleted
        if not special and not self._is_written(path, flags, mode):
            return entry
        if path not in self._replaced:
            made = files / str(len(self._replaced))
            self._replaced[path] = os.fsencode(made)
            if number not in names.deleted:
                fifo = number in names.pipes
                try:
                    _make(made, self.tree.user, mode, _int(values.get(_REGULAR_SIZE)), fifo=fifo)
                except (OSError, OverflowError) as error:  # the user's CRIU wrote that size
                    raise OutOfSpace(
                        f"no file like {os.fsdecode(path)} can be made for the rehearsal: {error}",
                        hint=f"make room in {files.parent.parent}",
                    ) from error
        return [
            Field.of(_REGULAR_NAME, self._replaced[path]) if each.number == _REGULAR_NAME else each
            for each in entry
        ]

    def _is_written(self, path: bytes, flags: int, mode: int) -> bool:
        name = os.fsdecode(path)
        if name in {file.path for file in self.tree.details.memory_files}:
            return True
        plain = not mode or stat.S_ISREG(mode)
        real = name.startswith(_IN_MEMORY) or not name.startswith(_NOT_FILES)
        return plain and real and flags & os.O_ACCMODE != os.O_RDONLY


def _make(path: Path, owner: Owner, mode: int, size: int, *, fifo: bool) -> None:
    """Make a file without content, and give it to the owner."""
    wanted = stat.S_IMODE(mode) or 0o600
    if fifo:
        os.mkfifo(path, 0o600)
        os.chown(path, owner.uid, owner.gid)
        path.chmod(wanted)
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, size)
        os.fchown(descriptor, owner.uid, owner.gid)
        os.fchmod(descriptor, wanted)
    finally:
        os.close(descriptor)


def _unix(entry: list[Field]) -> Iterable[Field]:
    """Give a socket with a path an abstract name; CRIU knows its peers by number."""
    values = {field.number: field.value for field in entry}
    name = values.get(_UNIX_NAME)
    outside = _int(values.get(_UNIX_FLAGS)) & OUTSIDE
    if outside or not isinstance(name, bytes) or name[:1] in (b"", b"\0"):
        return entry
    abstract = b"\0rehearsed-%d" % _int(values.get(_UNIX_ID))
    return [
        Field.of(_UNIX_NAME, abstract) if each.number == _UNIX_NAME else each
        for each in entry
        if each.number not in _OF_A_PATH
    ]


def _int(value: int | bytes | None) -> int:
    return value if isinstance(value, int) else 0
