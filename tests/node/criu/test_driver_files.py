"""Processes that have inherited the GPU driver's devices are saved, and restored without them."""

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from phosd.engine.criu.dump.check import check
from phosd.engine.criu.images.image_file import Field, ImageFile, fields, message
from phosd.engine.criu.run.driver_devices import DriverDevices
from phosd.engine.program import tree
from phosd.engine.system import procfs
from phosd.errors import Internal, Unsupported
from tests.node.criu.life import COUNTER, USER, Life, in_order
from tests.support.device_files import mapped, opened, pretend

PROGRAM = (
    """
import mmap, os, select, sys
device, library = sys.argv[1:]
with open(library, "rb") as file:
    loaded = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
first, second = os.open(device, os.O_RDWR), os.open(device, os.O_RDONLY)
both = mmap.mmap(first, 8192)
read_only = mmap.mmap(second, 4096, prot=mmap.PROT_READ)
if os.fork() == 0:
    while os.getppid() != 1:
        select.select([], [], [], 0.05)
    os._exit(0)
"""
    + COUNTER
)


@pytest.fixture
def place() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="phos-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def device(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return pretend(place, monkeypatch)


def library(place: Path, name: str = "libcuda.so.1") -> Path:
    """What a process that uses CUDA has mapped."""
    path = place / name
    path.write_bytes(bytes(4096))
    return path


@pytest.mark.parametrize("uid", [0, USER])
def test_they_are_inert_afterwards(
    lives: Callable[[int], Life], uid: int, place: Path, device: Path
) -> None:
    life = lives(uid)
    life.start(PROGRAM, str(device), str(library(place)))
    life.counts_on()
    before = {pid: mapped(pid, device) for pid in tree.scan(life.pid).pids}
    assert [len(lines) for lines in before.values()] == [2, 2]
    life.again()
    assert in_order(life.counts_on())
    assert tree.scan(life.pid).pids == tuple(before), "a process is missing"
    for pid, lines in before.items():
        assert not mapped(pid, device)
        assert not opened(pid, device)
        now = Path(f"/proc/{pid}/maps").read_text()
        inert = re.findall(r"(?m)^([0-9a-f]+)-([0-9a-f]+) ---p 0+ 00:00 0 *$", now)
        for line in lines:  # the kernel makes one mapping of two that are neighbours
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            there = [(int(one, 16), int(other, 16)) for one, other in inert]
            assert any(one <= start and end <= other for one, other in there), line
        counters = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        assert counters.count("anon_inode:[eventfd]") == 4  # each mapping has one of its own
    shutil.rmtree(life.images)
    life.again()  # what was restored is as good
    assert in_order(life.counts_on())


MANAGING = (
    """
import mmap, os, sys
device, library = sys.argv[1:]
with open(library, "rb") as file:
    loaded = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
first, second = os.open(device, os.O_RDWR), os.open(device, os.O_RDONLY | os.O_CLOEXEC)
shared = os.dup(first)
if os.fork() == 0:
    while os.getppid() != 1:
        __import__("time").sleep(0.05)
    os._exit(0)
os.close(shared)
"""
    + COUNTER
)


@pytest.mark.parametrize("uid", [0, USER])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_what_nvml_has_open_is_opened_anew(
    lives: Callable[[int], Life], uid: int, checkpointed: bool, place: Path, device: Path
) -> None:
    """It maps nothing of the devices, and the driver's checkpoint leaves it alone."""
    life = lives(uid)
    life.start(MANAGING, str(device), str(library(place, "libnvidia-ml.so.1")))
    life.counts_on()
    before = {pid: descriptors(pid, device) for pid in tree.scan(life.pid).pids}
    assert [len(found) for found in before.values()] == [2, 3]
    life.dump(checkpointed=frozenset({life.pid} if checkpointed else ()))
    life.kill()
    life.restore().settle()
    assert in_order(life.counts_on())
    assert {pid: descriptors(pid, device) for pid in before} == before
    shutil.rmtree(life.images)
    life.again()  # what was restored is as good
    assert {pid: descriptors(pid, device) for pid in before} == before


@pytest.mark.parametrize("how", ["is gone", "is closed to the user", "is another device"])
def test_a_device_that_nvml_cannot_open_here_is_inert(
    lives: Callable[[int], Life],
    how: str,
    place: Path,
    device: Path,
) -> None:
    life = lives(USER)
    life.start(MANAGING, str(device), str(library(place, "libnvidia-ml.so.1")))
    life.counts_on()
    life.dump()
    life.kill()
    if how == "is closed to the user":
        device.chmod(0o600)
    else:
        device.unlink()
    if how == "is another device":
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    life.restore().settle()
    assert in_order(life.counts_on())
    for pid, count in zip(tree.scan(life.pid).pids, (2, 3), strict=True):
        assert not opened(pid, device)
        links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
        assert links.count("anon_inode:[eventfd]") == count


def test_who_maps_a_device_is_more_than_a_user_of_nvml(
    life: Life, place: Path, device: Path
) -> None:
    life.start(PROGRAM, str(device), str(library(place, "libnvidia-ml.so.1")))
    life.counts_on()
    with pytest.raises(Unsupported, match="uses the GPU driver's devices without CUDA"):
        life.dump()
    life.counts_on()


def descriptors(pid: int, device: Path) -> dict[int, int]:
    """The flags of a process's descriptors of the device, by number."""
    found = [each for each in procfs.descriptors(pid) if each.target == str(device)]
    return {each.number: each.flags for each in found}


def test_who_did_not_inherit_them_is_refused(life: Life, place: Path, device: Path) -> None:
    """OpenGL and Vulkan use the same devices; restored without them they would fail."""
    life.start(PROGRAM, str(device), str(library(place, "libGL.so.1")))
    life.counts_on()
    with pytest.raises(Unsupported, match="uses the GPU driver's devices without CUDA"):
        life.dump()
    life.counts_on()


def test_who_was_checkpointed_has_none_left(life: Life, place: Path, device: Path) -> None:
    life.start(PROGRAM, str(device), str(library(place)))
    life.counts_on()
    with pytest.raises(Unsupported, match=r"still has .* after the driver's checkpoint"):
        life.dump(checkpointed=frozenset({life.pid}))
    life.counts_on()


@pytest.mark.parametrize("when", ["before it is stopped", "stopped"])
def test_opencl_is_named(when: str, life: Life, place: Path, device: Path) -> None:
    life.start(PROGRAM, str(device), str(library(place, "libnvidia-opencl.so.580")))
    life.counts_on()
    with pytest.raises(Unsupported, match=f"{life.pid} .*has NVIDIA's OpenCL loaded, of which"):
        if when == "stopped":
            life.dump(checkpointed=frozenset({life.pid}))
        else:
            check(life.criu, tree.scan(life.pid))
    life.counts_on()


def test_other_devices_are_refused_as_ever(
    life: Life, place: Path, device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PHOS_SOFTGPU_DEVICE_FILE")
    life.start(PROGRAM, str(device), str(library(place)))
    life.counts_on()
    with pytest.raises(Unsupported, match="is a block device"):
        life.dump()
    life.counts_on()


def test_the_devices_are_those_that_the_driver_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "devices").write_text(
        "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n238 nvidia-uvm\n\n"
        "Block devices:\n  7 loop\n259 nvidia-of-blocks\n"
    )
    monkeypatch.setattr("phosd.engine.system.procfs.PROC", tmp_path)
    found = DriverDevices.here()
    assert found.kinds == {"c195", "c238", "b259"}
    assert found.environment == {"PHOS_DRIVER_DEVICES": "b259 c195 c238"}
    assert not found.has(Path("/dev/null").stat())


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "mm-1.img"
    for data in (b"short", bytes(8) + b"\x09\0\0\0abc", bytes(8) + b"ab"):
        path.write_bytes(data)
        with pytest.raises(Internal, match=r"mm-1.img is not an image"):
            ImageFile.read(path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(Internal, match="not an image"):
        ImageFile.read(path)


def test_messages_survive() -> None:
    some = [Field.of(1, 300), Field.of(2, b"text"), Field(3, 1, bytes(8)), Field(4, 5, bytes(4))]
    some.append(Field.of(5, -1))
    assert [*fields(message(some))] == some
    for cut in (b"\x08", b"\x12\x05ab", b"\x19abc", b"\x0b", b"\x08" + b"\xff" * 11):
        with pytest.raises(ValueError, match=r"wire type|does not end|ends within"):
            list(fields(cut))
