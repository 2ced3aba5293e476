"""Hash and copy the bytes of files."""

import ctypes
import fcntl
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

_STEP = 1 << 20
_PIECE = 16 << 20
"""Bytes that one thread compares."""
_THREADS = min(8, os.cpu_count() or 1)
_FICLONE = 0x40049409
"""From linux/fs.h."""
_compare = ctypes.CDLL(None).memcmp  # called without the interpreter's lock
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


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


def copy_file(source: int, target: int, size: int) -> None:
    """Give an empty file the first ``size`` bytes of another: as a clone where that is possible."""
    if not _clone(source, target, size):
        copy_sparse(source, target, size)


def update_file(source: int, earlier: int, size: int) -> None:
    """Make an earlier copy, open to read and write, what the first ``size`` bytes of ``source`` are
    now: as a clone where that is possible; else only what differs is written.
    """
    if not _clone(source, earlier, size):
        _refresh(source, earlier, size)


def _clone(source: int, target: int, size: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError:  # not here, not between these two, or a fault that copying will meet, too
        return False
    os.ftruncate(target, size)
    return True


def _refresh(source: int, earlier: int, size: int) -> None:
    """Write what differs. Both are read from the kernel's cache, several pieces at a time."""
    os.ftruncate(earlier, size)
    pieces = range(0, size, _PIECE)
    refresh_piece = partial(_refresh_piece, source, earlier, size)
    if len(pieces) <= 1:
        for start in pieces:
            refresh_piece(start)
        return
    with ThreadPoolExecutor(_THREADS) as threads:
        for _ in threads.map(refresh_piece, pieces):
            pass


def _refresh_piece(source: int, earlier: int, size: int, start: int) -> None:
    now, before = bytearray(_STEP), bytearray(_STEP)
    here, there = ((ctypes.c_char * _STEP).from_buffer(each) for each in (now, before))
    for at in range(start, min(start + _PIECE, size), _STEP):
        count = min(_STEP, size - at)
        read = os.preadv(source, [memoryview(now)[:count]], at)
        known = os.preadv(earlier, [memoryview(before)[:count]], at)
        if read != known or _compare(here, there, read) != 0:
            _write(earlier, memoryview(now)[:read], at)


def _write(target: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(target, data, at)
        data, at = data[written:], at + written
