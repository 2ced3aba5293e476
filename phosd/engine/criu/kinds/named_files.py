"""Files with a path: regular ones, named pipes, and those that are mapped."""

import contextlib
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path

from phosd.engine.criu.files import file_worker
from phosd.engine.criu.files.file_orders import Orders
from phosd.engine.criu.images.fields import FileEntry, RegFileEntry
from phosd.engine.criu.images.image_file import Field, changed, with_bytes
from phosd.engine.criu.images.saved_files import SavedFiles
from phosd.engine.criu.kinds.kind import Choices, CloneNames, FileKind, Sizes
from phosd.engine.criu.kinds.stand_ins import StandIns
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.tree_resources import ONE_USER, TreeResources
from phosd.engine.image.cpu_manifest import CpuDetails
from phosd.engine.program.tree import ProcessTree
from phosd.engine.system.file_status import LOCAL, known_status
from phosd.engine.system.mounts import kind_at, memory_devices
from phosd.engine.system.procfs import Mapping
from phosd.errors import ImageCorrupt
from phosd.units import human_bytes

NOT_ON_DISK = ("/dev/", "/memfd:", "/anon_hugepage", "/SYSV")
"""Prefixes of mapped paths that are not files on disk."""
MOST_WRITTEN = 4 << 30
"""The bytes of all files on disks of a tree that are saved, at most."""
MOST_FILES = 1000
"""The number of them at most: each takes a descriptor while an image is restored."""
_DELETED = " (deleted)"
_NOT_FILES = ("/dev/", "/proc/", "/sys/")
_IN_MEMORY = "/dev/shm/"


class NamedFiles(FileKind):
    def refusals(self, tree: TreeResources, choices: Choices) -> Iterator[str]:
        mappings = tree.own_mappings
        for mapping in mappings:
            if mapping.path.startswith("/SYSV"):
                yield f"pid {mapping.pid} maps {mapping.path}, which is System V shared memory"
        yield from _not_savable(mappings, Owner.of(tree.tree))
        yield from _of_one_user(mappings)
        deleted = (each for each in mappings if each.path.endswith(_DELETED))
        replaced = [each for each in deleted if not each.path.startswith(NOT_ON_DISK)]
        for mapping in _not_to_be_put_back(tree.tree, replaced):
            yield (
                f"pid {mapping.pid} maps {mapping.path}, which was replaced since "
                "(start the program anew to use the new one)"
            )

    def require_sound(self, details: CpuDetails, sizes: Sizes) -> None:
        saved = [(file.saved, file.size) for file in details.memory_files]
        saved += [(file.saved, file.size) for file in details.written_files]
        for name, size in saved:
            if sizes.get(name) != size:
                raise ImageCorrupt(
                    f"the image names a file outside of it, or of another size: {name!r}",
                    hint="delete it",
                )

    def taken(
        self, files: SavedFiles, details: CpuDetails, moved: Collection[int]
    ) -> Iterator[str]:
        for number in sorted(files.pipes & files.paths.keys()):
            yield f"the named pipe {files.paths[number]}, from which each would read a part"
        for path in files.linked():
            yield f"what was saved of {path}, which was deleted"

    def in_clone(self, entry: Field, names: CloneNames) -> Field:
        if entry.number != FileEntry.REG or not entry.value:
            return entry

        def renamed(path: bytes) -> bytes:
            return names.paths.get(path, path)

        return changed(entry, partial(with_bytes, RegFileEntry.NAME, renamed))

    def in_rehearsal(self, entry: Field, stand_ins: StandIns) -> Field:
        if entry.number != FileEntry.REG or not entry.value:
            return entry
        return changed(entry, partial(_rehearsed, stand_ins))


def shared_with_disk(mappings: Iterable[Mapping]) -> Iterator[Mapping]:
    """Yield the writable shared mappings of files on a disk that still have their name."""
    in_memory = memory_devices()
    for mapping in mappings:
        if (
            mapping.shared
            and mapping.writable
            and mapping.device not in in_memory
            and not mapping.path.startswith((*NOT_ON_DISK, "anon_inode:"))
            and not mapping.path.endswith(_DELETED)
        ):
            yield mapping


def savable(file: os.stat_result, owner: Owner) -> bool:
    """Return whether the bytes of a file may be in an image of ``owner``, and come back from it:
    it is the owner's own, who may read and write it.
    """
    return file.st_uid == owner.uid and owner.may(0o6, file)


def is_local(mapping: Mapping) -> bool:
    """Return whether no server has to be asked for the bytes of a mapped file."""
    return kind_at(mapping.pid, mapping.path) in LOCAL


def _not_savable(mappings: Iterable[Mapping], owner: Owner) -> Iterator[str]:
    for mapping in shared_with_disk(mappings):
        where = f"pid {mapping.pid} maps {mapping.path} shared and writable"
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # unmapped meanwhile
            file = known_status(mapping.link)
            if file.st_size > MOST_WRITTEN:
                yield f"{where}, which has more than {human_bytes(MOST_WRITTEN)}"
            elif not savable(file, owner):
                yield f"{where}, which is not its owner's own to read and write"
            elif not is_local(mapping):
                yield f"{where}, which is on a file system of another machine, or FUSE"


def _of_one_user(mappings: Iterable[Mapping]) -> Iterator[str]:
    for mapping in {mapping.device: mapping for mapping in mappings}.values():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # unmapped meanwhile
            try:
                known_status(mapping.link)
            except PermissionError:
                yield f"pid {mapping.pid} maps {mapping.path}, {ONE_USER}"
                return


def _not_to_be_put_back(tree: ProcessTree, mappings: Iterable[Mapping]) -> Iterator[Mapping]:
    """Yield those of the mapped files that were deleted that their owner may not recreate.

    CRIU does so for a moment during the restore, at the old path and with the old owner.
    """
    owners = {process.pid: process for process in tree.living}
    by_owner: dict[Owner, list[Mapping]] = {}
    for mapping in mappings:
        owner = owners[mapping.pid]
        if owner.uid != 0:
            by_owner.setdefault(Owner(owner.uid, owner.gid, owner.groups), []).append(mapping)
    for user, theirs in by_owner.items():
        folders = {str(_folder(mapping)) for mapping in theirs}
        orders = Orders(user.uid, user.gid, user.groups, mark="", folders=tuple(folders))
        closed = file_worker.work(orders, file_worker.SHORT_TIMEOUT).closed
        for mapping in theirs:
            file = known_status(mapping.link)
            own = file.st_uid == user.uid and file.st_gid in (user.gid, *user.groups)
            if not own or str(_folder(mapping)) in closed:
                yield mapping


def _folder(mapping: Mapping) -> Path:
    return Path(mapping.path.removesuffix(_DELETED)).parent


def without_sizes(entry: list[Field]) -> Iterator[Field]:
    """Yield the fields of a ``file_entry`` so that a restore opens files of any size."""
    for each in entry:
        if each.number == FileEntry.REG and each.value:
            yield changed(each, _without_size)
        else:
            yield each


def _without_size(entry: list[Field]) -> list[Field]:
    return [each for each in entry if each.number != RegFileEntry.SIZE]


def _rehearsed(stand_ins: StandIns, entry: list[Field]) -> Iterable[Field]:
    """Give a file that a restore would open to write to the path of its stand-in."""
    values = {field.number: field.value for field in entry}
    path, number = values.get(RegFileEntry.NAME), _int(values.get(RegFileEntry.ID))
    flags, mode = _int(values.get(RegFileEntry.FLAGS)), _int(values.get(RegFileEntry.MODE))
    if not isinstance(path, bytes):
        return entry
    special = number in stand_ins.files.pipes or number in stand_ins.files.deleted
    if not special and not _is_written(stand_ins, os.fsdecode(path), flags, mode):
        return entry
    made = stand_ins.instead_of(path, number, mode, _int(values.get(RegFileEntry.SIZE)))
    return with_bytes(RegFileEntry.NAME, lambda _: made, entry)


def _is_written(stand_ins: StandIns, path: str, flags: int, mode: int) -> bool:
    if path in stand_ins.in_memory:
        return True
    plain = not mode or stat.S_ISREG(mode)
    real = path.startswith(_IN_MEMORY) or not path.startswith(_NOT_FILES)
    return plain and real and flags & os.O_ACCMODE != os.O_RDONLY


def _int(value: int | bytes | None) -> int:
    return value if isinstance(value, int) else 0
