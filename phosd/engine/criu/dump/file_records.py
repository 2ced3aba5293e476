"""Record the tree's files at the dump, and copy named files in memory.

Runs while the tree is frozen. CRIU saves neither the bytes of ordinary files (they stay on disk,
and may change) nor those of named files in memory (they may vanish, or change).
"""

import logging
import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from phosd.engine.criu.dump.shm_relink import DELETED
from phosd.engine.criu.files import file_worker
from phosd.engine.criu.files.file_bytes import copy_sparse, digest
from phosd.engine.criu.files.file_worker import Hashed, Orders
from phosd.engine.criu.kinds.named_files import NOT_ON_DISK
from phosd.engine.criu.run.invocation import Owner
from phosd.engine.image.cpu_manifest import MappedFile, MemoryFile, OpenFile
from phosd.engine.system.file_status import LOCAL, known_status, open_known
from phosd.engine.system.mounts import memory_devices, mount_types
from phosd.engine.system.procfs import Descriptor, Mapping
from phosd.errors import Busy, OutOfSpace, Timeout

_READ = os.O_RDONLY | os.O_NONBLOCK
"""Else opening a file on which somebody has a lease waits for them, 45 s for each file."""
_log = logging.getLogger(__name__)

HASHED = 64 << 20
"""Written files up to this size, in bytes, are hashed while the tree is frozen (0.05 s)."""

MEMORY_FOLDER = "memory"

_Inode = tuple[int, int]
"""Device and number."""
_File = tuple[int, int, int]
"""Device, inode, and how the file was opened."""


def open_files(descriptors: Iterable[Descriptor], owner: Owner) -> tuple[OpenFile, ...]:
    """Return the named regular files that the tree of ``owner`` has open, once for each file and
    access mode.
    """
    found: dict[_File, Descriptor] = {}
    for descriptor in descriptors:
        file = descriptor.file
        if not stat.S_ISREG(file.st_mode) or file.st_nlink == 0:
            continue
        if not descriptor.target.startswith("/") or descriptor.target.startswith("/memfd:"):
            continue
        way = descriptor.flags & (os.O_ACCMODE | os.O_APPEND)
        found.setdefault((file.st_dev, file.st_ino, way), descriptor)
    contents = _contents({key: each for key, each in found.items() if _is_hashed(each)}, owner)
    return tuple(
        OpenFile(
            pid=descriptor.pid,
            descriptor=descriptor.number,
            path=descriptor.target,
            flags=descriptor.flags,
            size=descriptor.file.st_size,
            mtime_ns=descriptor.file.st_mtime_ns,
            content=contents.get(key),
            mode=stat.S_IMODE(descriptor.file.st_mode),
        )
        for key, descriptor in found.items()
    )


def _is_hashed(descriptor: Descriptor) -> bool:
    appended = bool(descriptor.flags & os.O_APPEND)
    write_only = descriptor.flags & os.O_ACCMODE == os.O_WRONLY
    return write_only and not appended and descriptor.file.st_size <= HASHED


def _contents(descriptors: dict[_File, Descriptor], owner: Owner) -> dict[_File, str]:
    """Return the digests of files. A process with the owner's ids, which can be given up, reads
    those that a server has; if that takes too long, they have no digest.
    """
    mounts = {pid: mount_types(pid) for pid in {d.pid for d in descriptors.values()}}
    found: dict[_File, str] = {}
    remote: dict[_File, Hashed] = {}
    for key, descriptor in descriptors.items():
        if mounts[descriptor.pid].get(descriptor.mount) not in LOCAL:
            remote[key] = Hashed(str(descriptor.link), descriptor.file.st_size)
            continue
        try:
            opened = open_known(descriptor.link, *key[:2], _READ)
        except (BlockingIOError, FileNotFoundError):  # a lease, or another process has changed it
            continue
        try:
            found[key] = digest(opened, descriptor.file.st_size)
        finally:
            os.close(opened)
    if remote:
        orders = Orders(owner.uid, owner.gid, owner.groups, mark="", hashed=tuple(remote.values()))
        try:
            digests = file_worker.work(orders, file_worker.SHORT_TIMEOUT).digests
        except Timeout as error:  # the program shall not stand still for that
            _log.warning("files are saved without their digests: %s", error)
        else:
            found |= (each for each in zip(remote, digests, strict=True) if each[1])
    return found


def shared_memory(mappings: Iterable[Mapping], owner: Owner) -> frozenset[_Inode]:
    """Return the files in memory (tmpfs) that the tree of ``owner`` has for its data: it maps them
    shared, and writes to them, or may. Others are as good as on a disk.
    """
    in_memory = memory_devices()
    found: dict[_Inode, bool] = {}
    for mapping in mappings:
        if mapping.shared and mapping.device in in_memory:
            key = (mapping.device, mapping.inode)
            if not found.get(key):
                found[key] = mapping.writable or _may_write(known_status(mapping.link), owner)
    return frozenset(key for key, written in found.items() if written)


def _may_write(file: os.stat_result, owner: Owner) -> bool:
    """Return whether the owner may write to a file, or allow it to themselves."""
    return owner.uid == file.st_uid or owner.may(0o2, file)


def mapped_files(mappings: Iterable[Mapping], memory: Collection[_Inode]) -> tuple[MappedFile, ...]:
    """Return the named files that the tree maps and that are not its shared ``memory``."""
    found = {
        mapping.path: mapping
        for mapping in mappings
        if mapping.path.startswith("/")
        and not mapping.path.startswith(NOT_ON_DISK)
        and not mapping.path.endswith(DELETED)
        and not (mapping.shared and (mapping.device, mapping.inode) in memory)
    }
    return tuple(MappedFile(path, known_status(found[path].link).st_size) for path in sorted(found))


def save_memory_files(
    mappings: Iterable[Mapping],
    memory: Collection[_Inode],
    folder: Path,
    names: dict[str, str],
) -> tuple[MemoryFile, ...]:
    """Copy every named file that is the tree's shared ``memory`` to ``folder/memory/``.

    ``names`` are those of files that are mapped under one that is gone. Raises :class:`OutOfSpace`.
    """
    found: dict[_Inode, MemoryFile] = {}
    for mapping in mappings:
        key = (mapping.device, mapping.inode)
        if not mapping.shared or key not in memory or key in found:
            continue
        path = names.get(mapping.path, mapping.path)
        if not path.startswith("/") or path.endswith(DELETED):
            continue
        saved = f"{MEMORY_FOLDER}/{len(found)}"
        found[key] = _save(mapping, path, saved, folder)
    return tuple(found.values())


def _save(mapping: Mapping, path: str, saved: str, folder: Path) -> MemoryFile:
    target = folder / saved
    target.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        source = open_known(mapping.link, mapping.device, mapping.inode, _READ)
    except BlockingIOError as error:
        raise Busy(f"a process has a lease on {path}", hint="let it give up the lease") from error
    try:
        status = os.fstat(source)
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            copy_sparse(source, copy, status.st_size)
        except OSError as error:
            raise OutOfSpace(
                f"copying {path} into the image failed: {error.strerror}",
                hint="make room and try again",
            ) from error
        finally:
            os.close(copy)
    finally:
        os.close(source)
    return MemoryFile(path, saved, status.st_size, stat.S_IMODE(status.st_mode))
