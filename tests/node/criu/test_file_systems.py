"""Files come back on other file systems, too: on XFS, and on btrfs, whose mappings show another
device than the files have.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from phosd.engine.criu.files import file_bytes
from tests.node.criu.test_written_files import (
    test_a_kill_while_it_is_put_back,
    test_it_finds_what_it_had_written,
    test_what_was_declared,
)
from tests.support.rotation import EVERYTHING

__all__ = [
    "test_a_kill_while_it_is_put_back",
    "test_it_finds_what_it_had_written",
    "test_what_was_declared",
]

pytestmark = pytest.mark.skipif(not EVERYTHING, reason="`make test-all` installs mkfs for them")
SIZE = 400 << 20


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of its own, in a file, where users may come."""
    place = Path(tempfile.mkdtemp(prefix="phos-disk-", dir="/var/tmp"))
    place.chmod(0o755)
    image, mounted = place / "image", place / "mounted"
    image.touch()
    with image.open("r+b") as file:
        file.truncate(SIZE)
    subprocess.run([f"mkfs.{request.param}", "-q", image], check=True)
    mounted.mkdir()
    subprocess.run(["mount", "-o", "loop", image, mounted], check=True)
    try:
        yield mounted
    finally:
        subprocess.run(["umount", mounted], check=True)
        shutil.rmtree(place)


def test_copies_are_clones(disk: Path) -> None:
    """Which take no room until one of the two changes."""
    data = os.urandom(SIZE // 10)
    (disk / "file").write_bytes(data)
    os.sync()
    before = os.statvfs(disk).f_bfree
    with (disk / "file").open("rb") as source, (disk / "copy").open("w+b") as target:
        file_bytes.copy_file(source.fileno(), target.fileno(), len(data))
        file_bytes.update_file(source.fileno(), target.fileno(), len(data))
        os.fsync(target.fileno())
    assert (disk / "copy").read_bytes() == data
    assert before - os.statvfs(disk).f_bfree < len(data) // os.statvfs(disk).f_bsize // 4
