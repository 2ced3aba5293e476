"""Hash and copy the bytes of files."""

import hashlib
import os

_STEP = 1 << 20


def digest(descriptor: int, size: int) -> str:
    """Return the SHA-256 of the first ``size`` bytes; empty if the file is shorter."""
    sha = hashlib.sha256()
    at = 0
    while at < size and (piece := os.pread(descriptor, min(_STEP, size - at), at)):
        sha.update(piece)
        at += len(piece)
    return sha.hexdigest() if at == size else ""


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
