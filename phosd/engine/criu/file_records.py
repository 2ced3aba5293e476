"""Record the tree's files at the dump, and copy named files in memory.

Runs while the tree is frozen. CRIU saves neither the bytes of ordinary files (they stay on disk,
and may change) nor those of named files in memory (they may vanish, or change).
"""

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from phosd.engine.image.cpu_manifest import MappedFile, MemoryFile, OpenFile
from phosd.engine.system import procfs
from phosd.engine.system.procfs import Descriptor, Mapping
from phosd.errors import OutOfSpace

HASHED = 64 << 20
"""Written files up to this size, in bytes, are hashed while the tree is frozen (0.05 s)."""

NOT_ON_DISK = ("/dev/", "/memfd:", "/anon_hugepage", "/SYSV")
"""Prefixes of mapped paths that are not files on disk."""

_STEP = 1 << 20
MEMORY_FOLDER = "memory"


def open_files(descriptors: Iterable[Descriptor]) -> tuple[OpenFile, ...]:
    """Return the named regular files that the tree has open, once for each file and access mode."""
    found: dict[tuple[int, int, int], OpenFile] = {}
    for descriptor in descriptors:
        file = descriptor.file
        if not stat.S_ISREG(file.st_mode) or file.st_nlink == 0:
            continue
        if not descriptor.target.startswith("/") or descriptor.target.startswith("/memfd:"):
            continue
        way = descriptor.flags & (os.O_ACCMODE | os.O_APPEND)
        key = (file.st_dev, file.st_ino, way)
        if key not in found:
            found[key] = OpenFile(
                pid=descriptor.pid,
                descriptor=descriptor.number,
                path=descriptor.target,
                flags=descriptor.flags,
                size=file.st_size,
                mtime_ns=file.st_mtime_ns,
                content=_content(descriptor),
            )
    return tuple(found.values())


def _content(descriptor: Descriptor) -> str | None:
    appended = bool(descriptor.flags & os.O_APPEND)
    write_only = descriptor.flags & os.O_ACCMODE == os.O_WRONLY
    if not write_only or appended or descriptor.file.st_size > HASHED:
        return None
    link = procfs.PROC / str(descriptor.pid) / "fd" / str(descriptor.number)
    opened = os.open(link, os.O_RDONLY)
    try:
        return digest(opened, descriptor.file.st_size)
    finally:
        os.close(opened)


def digest(descriptor: int, size: int) -> str:
    """Return the SHA-256 of the first ``size`` bytes; empty if the file is shorter."""
    sha = hashlib.sha256()
    at = 0
    while at < size and (piece := os.pread(descriptor, min(_STEP, size - at), at)):
        sha.update(piece)
        at += len(piece)
    return sha.hexdigest() if at == size else ""


def mapped_files(mappings: Iterable[Mapping]) -> tuple[MappedFile, ...]:
    """Return the named files that the tree maps and :func:`save_memory_files` does not copy."""
    in_memory = procfs.memory_devices()
    paths = {
        mapping.path
        for mapping in mappings
        if mapping.path.startswith("/")
        and not mapping.path.startswith(NOT_ON_DISK)
        and not mapping.path.endswith(" (deleted)")
        and not (mapping.shared and mapping.device in in_memory)
    }
    return tuple(
        MappedFile(path, Path(path).stat().st_size) for path in sorted(paths) if Path(path).exists()
    )


def save_memory_files(mappings: Iterable[Mapping], folder: Path) -> tuple[MemoryFile, ...]:
    """Copy every named tmpfs file that the tree maps shared to ``folder/memory/``.

    Raises :class:`OutOfSpace`.
    """
    in_memory = procfs.memory_devices()
    found: dict[tuple[int, int], MemoryFile] = {}
    for mapping in mappings:
        key = (mapping.device, mapping.inode)
        if not mapping.shared or mapping.device not in in_memory or key in found:
            continue
        if not mapping.path.startswith("/") or mapping.path.endswith(" (deleted)"):
            continue
        saved = f"{MEMORY_FOLDER}/{len(found)}"
        found[key] = _save(mapping, saved, folder)
    return tuple(found.values())


def _save(mapping: Mapping, saved: str, folder: Path) -> MemoryFile:
    target = folder / saved
    target.parent.mkdir(mode=0o700, exist_ok=True)
    source = os.open(mapping.link, os.O_RDONLY)
    try:
        status = os.fstat(source)
        copy = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            copy_sparse(source, copy, status.st_size)
        except OSError as error:
            raise OutOfSpace(
                f"copying {mapping.path} into the image failed: {error.strerror}",
                hint="make room and try again",
            ) from error
        finally:
            os.close(copy)
    finally:
        os.close(source)
    return MemoryFile(mapping.path, saved, status.st_size, stat.S_IMODE(status.st_mode))


def copy_sparse(source: int, target: int, size: int) -> None:
    """Copy ``size`` bytes between two files, leaving holes as holes."""
    os.ftruncate(target, size)
    at = 0
    while at < size:
        try:
            begin = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        at = min(os.lseek(source, begin, os.SEEK_HOLE), size)
        os.lseek(source, begin, os.SEEK_SET)
        os.lseek(target, begin, os.SEEK_SET)
        while begin < at:
            moved = os.sendfile(target, source, None, at - begin)
            if moved == 0:
                return
            begin += moved
