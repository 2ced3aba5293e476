"""Pieces of files are copied by threads, whole; what is not is told with its place."""

import os
import random
from collections.abc import Iterator

import pytest

from phosd.engine.criu.restore.piece_copier import NotReadError, NotWrittenError, Piece, PieceCopier

SIZE = 5 << 20


@pytest.fixture
def source() -> Iterator[int]:
    descriptor = os.memfd_create("source")
    os.write(descriptor, random.Random(1).randbytes(SIZE))
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def target() -> Iterator[int]:
    descriptor = os.memfd_create("target")
    yield descriptor
    os.close(descriptor)


def test_pieces_are_where_they_belong(source: int, target: int) -> None:
    lengths = [1, 4096, 1 << 20, (1 << 20) + 1, 2 << 20, 70_000]
    at, pieces = 0, []
    for length in lengths:
        pieces.append(Piece(source, at, target, 2 * at + 3, length))
        at += length
    with PieceCopier(pieces) as copier:
        copier.finish()
        assert copier.done()
    for piece in pieces:
        copied = os.pread(target, piece.length, piece.place)
        assert copied == os.pread(source, piece.length, piece.position)


def test_nothing_to_copy_is_done(source: int, target: int) -> None:
    with PieceCopier([]) as copier:
        copier.finish()
        assert copier.done()


def test_a_source_that_ends_is_told(source: int, target: int) -> None:
    with PieceCopier([Piece(source, 4096, target, 0, SIZE)]) as copier:
        with pytest.raises(NotReadError) as raised:
            copier.finish()
        assert (raised.value.at, raised.value.cause) == (SIZE, None)
        with pytest.raises(NotReadError):
            copier.done()


def test_a_target_that_takes_nothing_is_told(source: int) -> None:
    closed = os.open("/dev/full", os.O_WRONLY)
    try:
        with (
            PieceCopier([Piece(source, 0, closed, 0, 4096)]) as copier,
            pytest.raises(NotWrittenError) as raised,
        ):
            copier.finish()
        assert raised.value.cause is not None
    finally:
        os.close(closed)


def test_the_end_of_the_context_stops_it(source: int, target: int) -> None:
    """A reader that is never served: the threads end with the piece that each has."""
    pieces = (Piece(source, 0, target, 0, 1 << 20) for _ in iter(int, 1))
    with PieceCopier(pieces) as copier:
        assert not copier.done()
