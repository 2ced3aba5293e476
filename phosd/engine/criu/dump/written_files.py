"""Save the bytes of the files that a tree writes to, as of the stop.

CRIU leaves the bytes of ordinary files to whoever restores: a program that went on after its
checkpoint has changed its database since. They are copied while the program still runs; the copies
of what has changed since, or is mapped, are brought up to date when the tree is frozen, so that all
of it is of one moment. On a file system that can clone files, where the image is, too, a copy is a
clone. What is only appended to needs no bytes: it may have grown.
"""

import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from msgspec.structs import replace

from phosd.engine.criu.dump.declared_files import DeclaredFile, DeclaredFiles
from phosd.engine.criu.files.attributes import attributes_of
from phosd.engine.criu.files.file_bytes import copy_file, update_file
from phosd.engine.criu.kinds.named_files import (
    MOST_FILES,
    MOST_WRITTEN,
    is_local,
    savable,
    shared_with_disk,
)
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.criu.run.part import CriuPart
from phosd.engine.criu.run.tree_resources import TreeResources
from phosd.engine.faults import Point, point
from phosd.engine.image.cpu_manifest import WRITTEN, CpuDetails, WrittenFile
from phosd.engine.system.file_status import LOCAL, known_status, open_known
from phosd.engine.system.mounts import mount_types
from phosd.engine.system.procfs import Descriptor
from phosd.engine.system.removal import remove_trees
from phosd.errors import OutOfSpace

_TICK_NS = 20_000_000
"""A file that was changed so shortly before it was read may change again with the same times."""
_READ = os.O_RDONLY | os.O_NONBLOCK

_Inode = tuple[int, int]
"""Device and number."""


@dataclass(frozen=True)
class _Written:
    """A file that a tree writes to: its path, a link to it, its status, and whether it is mapped,
    so that its times do not tell when it was written. ``declared``: the tree need not have it open.
    """

    path: str
    link: Path
    status: os.stat_result
    mapped: bool
    declared: bool = False

    @property
    def stamp(self) -> tuple[int, ...]:
        """A value that changes when the file does, unless it is mapped."""
        now = self.status
        return now.st_size, now.st_mtime_ns, now.st_ctime_ns


class _Copy(NamedTuple):
    """The name of a copy, its bytes, and the file's extended attributes."""

    name: str
    size: int
    attributes: dict[str, str]


@dataclass(frozen=True)
class Chosen:
    """The files that a tree writes to, and paths of those that are too large to be saved."""

    files: dict[_Inode, _Written]
    left_out: tuple[str, ...]

    @property
    def byte_count(self) -> int:
        """The bytes that they take in an image, at most."""
        return sum(each.status.st_size for each in self.files.values())


def chosen(tree: TreeResources, declared: Iterable[DeclaredFile] = ()) -> Chosen:
    """Return which files of a tree are saved: its owner's own, on file systems of this machine."""
    files, left_out = dict[_Inode, _Written](), list[str]()
    left, owner = MOST_WRITTEN, Owner.of(tree.tree)
    found = dict(_declared(declared, owner)) | dict(_written(tree, owner))
    for key, each in sorted(found.items(), key=lambda item: item[1].status.st_size):
        left -= each.status.st_size
        if left >= 0 and len(files) < MOST_FILES:
            files[key] = each
        else:
            left_out.append(each.path)
    return Chosen(files, tuple(sorted(left_out)))


def _written(tree: TreeResources, owner: Owner) -> Iterator[tuple[_Inode, _Written]]:
    """Yield the files, those that are mapped last."""
    kinds = dict[int, dict[int, str]]()
    for pid in {each.pid for each in tree.descriptors}:
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            kinds[pid] = mount_types(pid)
    for descriptor in tree.own_descriptors:
        kind = kinds.get(descriptor.pid, {}).get(descriptor.mount)
        if kind in LOCAL and _is_written(descriptor) and savable(descriptor.file, owner):
            yield _key(descriptor.file), _of(descriptor)
    for mapping in shared_with_disk(tree.own_mappings):
        with suppress(FileNotFoundError, ProcessLookupError):  # unmapped meanwhile
            if is_local(mapping) and savable(status := known_status(mapping.link), owner):
                yield _key(status), _Written(mapping.path, mapping.link, status, mapped=True)


def _declared(files: Iterable[DeclaredFile], owner: Owner) -> Iterator[tuple[_Inode, _Written]]:
    for file in files:
        with suppress(FileNotFoundError, ProcessLookupError):  # the worker has ended
            status = known_status(file.link)
            if savable(status, owner):
                found = _Written(file.path, file.link, status, mapped=False, declared=True)
                yield _key(status), found


def _is_written(descriptor: Descriptor) -> bool:
    file, target = descriptor.file, descriptor.target
    named = target.startswith("/") and not target.startswith(("/memfd:", "/proc/", "/sys/"))
    appended = descriptor.flags & (os.O_ACCMODE | os.O_APPEND) == os.O_WRONLY | os.O_APPEND
    plain = stat.S_ISREG(file.st_mode) and file.st_nlink > 0
    return named and plain and descriptor.writable and not appended


def _key(status: os.stat_result) -> _Inode:
    return status.st_dev, status.st_ino


def _of(descriptor: Descriptor) -> _Written:
    return _Written(descriptor.target, descriptor.link, descriptor.file, mapped=False)


class WrittenFiles(CriuPart):
    """Saves the files of a tree to ``folder/written``. ``before`` is the tree while it runs.

    They are beside the folder, for root alone, until CRIU has ended, whose user may write there.
    """

    def __init__(self, before: TreeResources, folder: Path, declared: DeclaredFiles) -> None:
        self._before = before
        self._declared = declared
        self._folder = folder
        self._private = folder
        self._copies: dict[_Inode, tuple[_Copy, tuple[int, ...] | None]] = {}
        """The copies made before the stop, and the stamps that the files had. None: they may have
        changed with the same one.
        """
        self._saved: tuple[WrittenFile, ...] = ()
        self.left_out: tuple[str, ...] = ()
        """Paths of files that were too large, or too many, when the tree was frozen."""

    def __enter__(self) -> Self:
        self._private = Path(tempfile.mkdtemp(prefix="written-", dir=self._folder.parent))
        try:
            found = chosen(self._before, self._declared.now())
            for number, (key, each) in enumerate(found.files.items()):
                point(Point.FILES_READ)
                settled = each.status.st_ctime_ns < time.time_ns() - _TICK_NS
                if copied := self._copied(each, str(number)):
                    self._copies[key] = copied, each.stamp if settled else None
        except BaseException:
            remove_trees([self._private])
            raise
        return self

    def __exit__(self, *_: object) -> None:
        remove_trees([self._private])

    def frozen(self, tree: TreeResources) -> None:
        saved: list[WrittenFile] = []
        point(Point.FILES_FROZEN)
        found = chosen(tree, self._declared.now())
        self.left_out = found.left_out
        for key, each in found.files.items():
            copied, stamp = self._copies.get(key, (None, None))
            if copied is None or stamp != each.stamp or each.mapped:
                copied = self._copied(each, copied.name if copied else f"frozen-{len(saved)}")
            if copied is not None:
                saved.append(_record(each, copied))
        self._saved = tuple(saved)

    def record(self, details: CpuDetails) -> CpuDetails:
        return replace(details, written_files=self._saved, declared=self._declared.state)

    def complete(self) -> None:
        point(Point.FILES_COMPLETE)
        needed = {Path(each.saved).name for each in self._saved}
        for path in self._private.iterdir():
            if path.name not in needed:
                path.unlink()
        if needed:
            self._private.rename(self._folder / WRITTEN)

    def _copied(self, file: _Written, name: str) -> _Copy | None:
        """Make the copy of a name what the file is. Returns None if it has gone, or is lent (a
        lease).
        """
        try:
            source = open_known(file.link, *_key(file.status), _READ)
        except (FileNotFoundError, ProcessLookupError, BlockingIOError):
            return None
        try:
            target = os.open(self._private / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                bring = update_file if os.fstat(target).st_size > 0 else copy_file
                bring(source, target, size := os.fstat(source).st_size)
                return _Copy(name, size, attributes_of(source))
            finally:
                os.close(target)
        except OSError as error:
            raise OutOfSpace(
                f"copying {file.path} into the image failed: {error.strerror}",
                hint="make room and try again",
            ) from error
        finally:
            os.close(source)


def _record(file: _Written, copy: _Copy) -> WrittenFile:
    status = file.status
    return WrittenFile(
        path=file.path,
        saved=f"{WRITTEN}/{copy.name}",
        size=copy.size,
        mode=stat.S_IMODE(status.st_mode),
        gid=status.st_gid,
        inode=0 if file.declared else status.st_ino,
        mtime_ns=status.st_mtime_ns,
        mapped=file.mapped,
        declared=file.declared,
        attributes=copy.attributes,
    )
