"""The account of a software GPU, to which any user may write."""

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.node.software_account import used

TOTAL, ME, TOKEN, ENDED = 1 << 30, os.getpid(), 7 << 60, 5
_MIB = 1 << 20


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of GPU 0; this process has a software GPU, as its socket says."""
    monkeypatch.setenv("PHOS_SOFTGPU_DIR", str(tmp_path))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0phos-softgpu-{ME}-{TOKEN:016x}")
        listening.listen()
        yield tmp_path / "gpu0"


def records(*found: tuple[int, int, int]) -> bytes:
    """Return records of inode, bytes and token."""
    return b"".join(struct.pack("=QQQII", *record, ME, 1) for record in found)


def test_memory_that_several_have_counts_once_and_of_the_dead_not_at_all(account: Path) -> None:
    assert used(0, TOTAL) == (0, ()), "there is no account yet"
    account.write_bytes(
        records((1, _MIB, TOKEN), (1, _MIB, TOKEN), (2, 5, TOKEN), (3, 7 * _MIB, ENDED))
        + b"half a record"
    )
    assert used(0, TOTAL) == (_MIB + 5, (ME,))
    assert used(1, TOTAL) == (0, ())


def test_no_figure_is_beyond_what_the_gpu_has(account: Path) -> None:
    account.write_bytes(records((1, 2**64 - 1, TOKEN), (2, 2**64 - 1, TOKEN)))
    assert used(0, TOTAL) == (TOTAL, (ME,))


def test_what_is_no_plain_file_is_not_read(account: Path, tmp_path: Path) -> None:
    """Without waiting for it, or following where it leads."""
    os.mkfifo(account)
    assert used(0, TOTAL) == (0, ())
    account.unlink()
    (tmp_path / "other").write_bytes(records((1, 5, TOKEN)))
    account.symlink_to(tmp_path / "other")
    assert used(0, TOTAL) == (0, ())
