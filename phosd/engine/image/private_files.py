"""Open and write the store's files: private, without following links, durable."""

import errno
import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from phosd.errors import ImageCorrupt, NotAuthorized, OutOfSpace
from phosd.units import human_bytes

_PIECE = 16 << 20
_READ = 1 << 20
_HASHERS = min(16, os.cpu_count() or 1)


def open_private(
    path: "Path | str", flags: int, *, dir_fd: int | None = None, lent: bool = False
) -> int:
    """Open a file or folder that belongs to this user and is closed to all others; if it is
    ``lent``, others may read it.

    Raises :class:`NotAuthorized` if it is not, :class:`FileNotFoundError` if it does not exist.
    """
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=dir_fd)
    try:
        _require(os.fstat(fd), str(path), directory=bool(flags & os.O_DIRECTORY), lent=lent)
    except BaseException:
        os.close(fd)
        raise
    return fd


def require_private(folder: Path) -> None:
    """Raise :class:`NotAuthorized` unless ``folder`` is ours and closed to others."""
    os.close(open_private(folder, os.O_RDONLY | os.O_DIRECTORY))


def open_below(folder: int, relative: str, *, lent: bool = False) -> int:
    """Open a file for reading below an open folder; no part of the path may be a link."""
    *parents, name = relative.split("/")
    at = os.dup(folder)
    try:
        for part in parents:
            below = open_private(part, os.O_RDONLY | os.O_DIRECTORY, dir_fd=at, lent=lent)
            os.close(at)
            at = below
        return open_private(name, os.O_RDONLY, dir_fd=at, lent=lent)
    finally:
        os.close(at)


def read_private(
    path: "Path | str", limit: int, *, dir_fd: int | None = None, lent: bool = False
) -> bytes:
    """Read a whole private file. Raises what :func:`open_private` does, and :class:`ImageCorrupt`
    if it exceeds ``limit`` bytes.
    """
    with os.fdopen(open_private(path, os.O_RDONLY, dir_fd=dir_fd, lent=lent), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ImageCorrupt(
            f"{path} is larger than {human_bytes(limit)}", hint="phosd did not write it; delete it"
        )
    return data


def write_durably(path: Path, data: bytes) -> None:
    """Write a new file (mode 0600) and fsync it. The caller fsyncs the folder."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def space_errors(what: str) -> Iterator[None]:
    """Turn a full disk or quota inside into :class:`OutOfSpace`; ``what`` names the file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OutOfSpace(
            f"writing {what} failed: {error.strerror}",
            hint="delete images (`phos rm`) or give the store a larger disk",
        ) from error


def unused(path: Path) -> bool:
    """Return whether no living job holds a lock on the folder or pack."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        close_locked(fd)
    return True


def close_locked(fd: int) -> None:
    """Close a descriptor and release its lock (flock), if it has one.

    Without the release, a child that is being started would keep the lock through its copy of the
    descriptor until it calls exec.
    """
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def sync_folder(folder: Path) -> None:
    """Fsync ``folder``, so that the names in it are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def file_digest(descriptor: int) -> str:
    """Return the digest of a whole open file, in hex: SHA-256 over the SHA-256s of 16 MiB pieces.

    The pieces are hashed in parallel: one core hashes 1-2 GB/s, and CRIU's files have gigabytes.
    """
    size = os.fstat(descriptor).st_size
    with ThreadPoolExecutor(_HASHERS) as pool:
        pieces = pool.map(lambda at: _piece_digest(descriptor, at), range(0, size, _PIECE))
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def _piece_digest(descriptor: int, offset: int) -> bytes:
    sha = hashlib.sha256()
    left = _PIECE
    while left and (part := os.pread(descriptor, min(left, _READ), offset)):
        sha.update(part)
        offset += len(part)
        left -= len(part)
    return sha.digest()


def _require(status: os.stat_result, name: str, *, directory: bool, lent: bool) -> None:
    kind = stat.S_ISDIR(status.st_mode) if directory else stat.S_ISREG(status.st_mode)
    closed = 0o022 if lent else 0o077
    if status.st_uid != os.geteuid() or status.st_mode & closed or not kind:
        raise NotAuthorized(
            f"{name} is not a {'folder' if directory else 'file'} of user {os.geteuid()} alone:"
            " others own it or have access",
            hint=f"if you trust its content: `chown {os.geteuid()} {name}; chmod go= {name}`",
        )
