"""Copy pieces of open files with threads.

Pieces are read into a buffer and written from there, not from a mapping: an error of the disk is an
error here, and no signal that ends phosd. Both calls run without Python's lock. Into the memory of
a process one thread writes 2.4 GB/s, 8 write 13 and 16 write 17 (16 cores, pages of 4 KiB).
"""

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

_BUFFER = 1 << 20
"""Bytes; what was read is still in a core's cache when it is written."""
_MOST_THREADS = 16


class Piece(NamedTuple):
    """``length`` bytes at ``position`` of the file ``source``, for ``place`` in ``target``."""

    source: int
    position: int
    target: int
    place: int
    length: int


class NotWrittenError(Exception):
    """Part of a piece could not be written; ``at`` is its place, ``cause`` the reason, if any."""

    def __init__(self, piece: Piece, at: int, cause: OSError | None) -> None:
        super().__init__(f"{at:#x}: {cause}")
        self.piece, self.at, self.cause = piece, at, cause


class NotReadError(Exception):
    """Part of a piece could not be read; ``at`` is its position, ``cause`` the reason, if any."""

    def __init__(self, piece: Piece, at: int, cause: OSError | None) -> None:
        super().__init__(f"{at}: {cause}")
        self.piece, self.at, self.cause = piece, at, cause


class PieceCopier:
    """Copies ``pieces`` from now on. Leaving the context stops it."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._left = _parts(pieces)
        self._turn = threading.Lock()
        self._stopped = False
        count = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(count, "pages")
        self._threads = [self._pool.submit(self._work) for _ in range(count)]

    def done(self) -> bool:
        """Return whether all is copied. Raises :class:`NotWrittenError` and
        :class:`NotReadError`.
        """
        over = all(thread.done() for thread in self._threads)
        if over or self._stopped:
            self.finish()
        return over

    def finish(self) -> None:
        """Wait until all is copied. Raises what :meth:`done` raises."""
        wait(self._threads)
        for thread in self._threads:
            thread.result()

    def __enter__(self) -> "PieceCopier":
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._pool.shutdown()

    def _work(self) -> None:
        buffer = memoryview(bytearray(_BUFFER))
        try:
            while (piece := self._next()) is not None:
                _copy(piece, buffer)
        except BaseException:
            self._stopped = True
            raise

    def _next(self) -> Piece | None:
        with self._turn:
            return None if self._stopped else next(self._left, None)


def _parts(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Divide pieces into those that fit into a buffer."""
    for piece in pieces:
        for at in range(0, piece.length, _BUFFER):
            yield piece._replace(
                position=piece.position + at,
                place=piece.place + at,
                length=min(_BUFFER, piece.length - at),
            )


def _copy(piece: Piece, buffer: memoryview) -> None:
    done = 0
    while done < piece.length:
        at = piece.position + done
        try:
            count = os.preadv(piece.source, [buffer[done : piece.length]], at)
        except OSError as error:
            raise NotReadError(piece, at, error) from error
        if not count:
            raise NotReadError(piece, at, None)
        done += count
    done = 0
    while done < piece.length:
        at = piece.place + done
        try:
            count = os.pwrite(piece.target, buffer[done : piece.length], at)
        except OSError as error:
            raise NotWrittenError(piece, at, error) from error
        if not count:  # the memory of a process that has ended
            raise NotWrittenError(piece, at, None)
        done += count
