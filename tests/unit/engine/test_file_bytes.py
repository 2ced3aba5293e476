"""Copies of files are what the files are, however these have changed since."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.criu.files.file_bytes import copy_file, update_file

SIZE = 40 << 20
"""Several pieces of those that are compared at a time, the last of them not whole."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A file with a hole, and a copy of it."""
    flags = os.O_RDWR | os.O_CREAT
    source, copy = (os.open(tmp_path / name, flags) for name in ("source", "copy"))
    os.pwrite(source, random.Random(1).randbytes(5 << 20), 0)
    os.pwrite(source, b"end", SIZE)
    copy_file(source, copy, SIZE + 3)
    yield source, copy
    os.close(source)
    os.close(copy)


def bytes_of(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def test_a_copy_has_the_holes(pair: tuple[int, int]) -> None:
    source, copy = pair
    assert bytes_of(copy) == bytes_of(source)
    assert os.fstat(copy).st_blocks * 512 < SIZE / 2


@pytest.mark.parametrize("size", [SIZE + 3, SIZE + (1 << 20), SIZE // 2, 100, 0])
def test_a_copy_becomes_what_the_file_is(size: int, pair: tuple[int, int]) -> None:
    """It has grown, been cut, and been written to here and there, also where it was a hole."""
    source, copy = pair
    os.ftruncate(source, size)
    chance = random.Random(size)
    for _ in range(50 if size else 0):
        os.pwrite(source, chance.randbytes(5000)[: size or 1], chance.randrange(size))
    os.ftruncate(source, size)
    update_file(source, copy, size)
    assert bytes_of(copy) == bytes_of(source)


def test_only_what_differs_is_written(pair: tuple[int, int]) -> None:
    source, copy = pair
    os.pwrite(source, b"changed", 3 << 20)
    before = os.fstat(copy).st_blocks
    update_file(source, copy, SIZE + 3)
    assert bytes_of(copy) == bytes_of(source)
    assert os.fstat(copy).st_blocks <= before + 8  # a hole is still one
