"""Pages of files in memory are there before anybody needs them."""

import errno
import mmap
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.system import prefault

MEMORY = Path("/dev/shm")


@pytest.fixture
def file() -> Iterator[int]:
    with tempfile.TemporaryFile(dir=MEMORY) as made:
        yield made.fileno()


@pytest.mark.parametrize("size", [1, 4096, prefault.PIECE, prefault.PIECE + 4097])
def test_all_pages_are_there_and_empty(size: int, file: int) -> None:
    prefault.allocate(file, size)
    status = os.fstat(file)
    assert status.st_size == size and status.st_blocks * 512 >= size
    assert os.pread(file, size, 0) == bytes(size)


def test_more_than_there_is_takes_nothing(file: int) -> None:
    with pytest.raises(OSError) as raised:
        prefault.allocate(file, 1 << 45)
    assert raised.value.errno == errno.ENOSPC
    assert os.fstat(file).st_blocks == 0


def test_somebody_takes_the_memory_meanwhile(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def touch(address: int, length: int) -> None:
        asked.append(length)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(prefault, "touch", touch)
    with pytest.raises(OSError, match="full"):
        prefault.allocate(file, prefault.PIECE)
    assert asked == [prefault.PIECE]


def test_a_kernel_that_cannot_touch(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def touch(address: int, length: int) -> None:
        raise OSError(errno.EINVAL, "what is 23?")

    monkeypatch.setattr(prefault, "touch", touch)
    prefault.allocate(file, 8192)
    assert os.fstat(file).st_blocks * 512 >= 8192


def test_memory_that_is_not_mapped() -> None:
    with pytest.raises(OSError) as raised:
        prefault.touch(0, 4096)
    assert raised.value.errno == errno.ENOMEM


def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    """The kernel answers with EFAULT: a write would end in SIGBUS."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=True)
    try:
        with (tmp_path / "file").open("w+b") as file:
            file.truncate(4 << 20)
            with mmap.mmap(file.fileno(), 4 << 20) as memory, pytest.raises(OSError) as raised:
                prefault.touch(prefault.address_of(memory), 4 << 20)
            assert raised.value.errno == errno.ENOSPC
    finally:
        subprocess.run(["umount", tmp_path], check=True)
