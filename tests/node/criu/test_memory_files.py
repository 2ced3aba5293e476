"""Named files in memory that are mapped shared: CRIU does not save their bytes, phosd does."""

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phosd.engine.criu.dump.check import check
from phosd.engine.program import tree
from phosd.errors import Busy, ImageCorrupt, Internal, Unsupported
from tests.node.criu.life import COUNTER, USER, Life, in_order
from tests.node.criu.test_files import broken_criu

SHARED_COUNTER = """
import mmap, os, sys, time
path = sys.argv[1]
descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
os.ftruncate(descriptor, 64 << 20)
memory = mmap.mmap(descriptor, 64 << 20)
while True:
    value = int.from_bytes(memory[:8], "little") + 1
    memory[:8] = memory[-8:] = value.to_bytes(8, "little")
    assert memory[4096:4104] == bytes(8)
    print(value, flush=True)
    time.sleep(0.005)
"""


@pytest.fixture
def name() -> Iterator[Path]:
    """A name in ``/dev/shm``."""
    path = Path(f"/dev/shm/phos-test-{os.getpid()}")
    yield path
    for left in path.parent.glob(path.name + "*"):
        left.unlink()


def test_the_counter_goes_back_with_the_program(lives: Callable[[int], Life], name: Path) -> None:
    life = lives(USER)
    life.start(SHARED_COUNTER, str(name))
    life.counts_on()
    life.dump()
    saved = life.images / "memory/0"
    assert saved.stat().st_blocks * 512 < 1 << 20, "holes stay holes"
    life.counts_on()
    life.kill()
    before = life.values()
    life.restore().settle()
    values = life.counts_on()
    assert values[len(before)] < before[-1], "it counts from the checkpoint, not from the kill"
    assert in_order(values)
    assert [path.name for path in name.parent.glob(name.name + "*")] == [name.name]
    status = name.stat()
    assert (status.st_uid, status.st_mode & 0o777) == (USER, 0o640)


def test_a_name_that_is_gone_is_put_back(life: Life, name: Path) -> None:
    life.start(SHARED_COUNTER, str(name))
    life.counts_on()
    life.dump()
    life.kill()
    name.unlink()
    life.restore().settle()
    assert in_order(life.counts_on())


@pytest.mark.parametrize("gone", [True, False])
def test_a_failed_restore_leaves_the_name_as_it_was(life: Life, name: Path, gone: bool) -> None:
    life.start(SHARED_COUNTER, str(name))
    life.counts_on()
    life.dump()
    life.kill()
    before = None if gone else name.read_bytes()
    if gone:
        name.unlink()
    life.criu = broken_criu(life)
    with pytest.raises(Internal):
        life.restore()
    assert (name.read_bytes() if name.exists() else None) == before
    assert len(list(name.parent.glob(name.name + "*"))) == (0 if gone else 1)


def test_memory_that_others_use_is_not_replaced(life: Life, name: Path) -> None:
    life.start(SHARED_COUNTER, str(name))
    life.counts_on()
    life.dump()
    life.kill()
    with (
        name.open("r+b") as file,
        mmap.mmap(file.fileno(), 4096),
        pytest.raises(Busy, match=rf"pid {os.getpid()} .* uses {name}"),
    ):
        life.restore()


def test_saved_memory_belongs_to_the_hashed_image(life: Life, name: Path) -> None:
    life.start(SHARED_COUNTER, str(name))
    life.counts_on()
    life.dump()
    life.kill()
    with (life.images / "memory/0").open("r+b") as file:
        file.write(b"\xff")
    assert life.record is not None
    with pytest.raises(ImageCorrupt, match="memory/0 is not what was saved"):
        life.saved_tree.check_bytes()


def test_a_shared_file_on_disk_of_another_user_is_refused_by_name(life: Life) -> None:
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as on_disk:  # /tmp may be a tmpfs
        os.chown(on_disk.name, USER, USER)
        life.start(SHARED_COUNTER, on_disk.name)
        life.counts_on()
        with pytest.raises(Unsupported, match=rf"{on_disk.name} .* not its owner's own"):
            check(life.criu, tree.scan(life.pid))
        assert in_order(life.counts_on())


def test_a_shared_file_that_is_only_read_is_no_obstacle(life: Life) -> None:
    (life.home / "table").write_bytes(bytes(8192))
    life.start(
        "import mmap\nfile = open('table', 'rb')\n"
        "table = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n" + COUNTER
    )
    life.counts_on()
    check(life.criu, tree.scan(life.pid))
    life.again()
    assert in_order(life.counts_on())


READS_MEMORY = """
import mmap, os, sys, time
memory = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, prot=mmap.PROT_READ)
value = 0
while True:
    value += 1
    assert memory[:4] == b"data"
    print(value, flush=True)
    time.sleep(0.005)
"""


@pytest.mark.parametrize("place", ["/dev/shm", "/run"])
def test_memory_that_is_only_read_is_as_a_file_on_a_disk(
    lives: Callable[[int], Life], place: str
) -> None:
    """Its user could not put it back."""
    data = Path(place, f"phos-test-read-{os.getpid()}")
    data.write_bytes(b"data" * 1024)
    data.chmod(0o644)
    try:
        life = lives(USER)
        life.start(READS_MEMORY, str(data))
        life.counts_on()
        assert not life.dump().details.memory_files
        life.kill()
        life.restore().settle()
        assert in_order(life.counts_on())
    finally:
        data.unlink()
