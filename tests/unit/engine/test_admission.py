"""What a node has, who works on what, and whether there is room: asked before anything stops."""

import os
import threading
from collections import namedtuple
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from phosd.engine.criu.run.program import Criu
from phosd.engine.image.manifest import CHUNK, Host, Manifest, Process
from phosd.engine.image.packs import RECORD
from phosd.engine.node import machine
from phosd.engine.node import staging as staging_module
from phosd.engine.node.gpus import GpuInfo
from phosd.engine.node.machine import require_same_machine
from phosd.engine.node.node import Node, NodeConfig
from phosd.engine.node.readied import ReadiedMemory
from phosd.engine.operations import admission
from phosd.engine.operations.admission import (
    DiskLimits,
    SizeOrShare,
    check_space,
    require_device_memory,
)
from phosd.engine.program.group import CheckpointGroup
from phosd.engine.system.host_memory import available_memory
from phosd.errors import Busy, DriverTooOld, OutOfMemory, OutOfSpace, Unsupported
from tests.support.samples import publish

Room = namedtuple("Room", "f_bavail f_frsize")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(NodeConfig(state_dir=tmp_path / "state", runtime_dir=tmp_path / "run")) as made:
        yield made


# -- claims ------------------------------------------------------------------------------------


def test_a_claim_keeps_others_out_until_it_ends(node: Node) -> None:
    with node.claim([1, 2]):
        with pytest.raises(Busy, match="process 2"), node.claim([2, 3]):
            pytest.fail("two jobs on one process")
        with node.claim([3]):  # what was refused as a whole was not taken in part
            pass
    with node.claim([1, 2, 3]):
        pass


def test_a_failed_job_gives_up_its_claim(node: Node) -> None:
    with pytest.raises(ZeroDivisionError), node.claim([1]):
        raise ZeroDivisionError
    with node.claim([1]):
        pass


def test_one_of_many_gets_it(node: Node) -> None:
    start, end = threading.Barrier(8), threading.Barrier(8)
    got: list[int] = []

    def compete(number: int) -> None:
        start.wait(10)
        try:
            with node.claim([7]):
                got.append(number)
                end.wait(10)
        except Busy:
            end.wait(10)

    threads = [threading.Thread(target=compete, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


# -- staging -----------------------------------------------------------------------------------


def test_staging_is_private_and_gone_afterwards(node: Node) -> None:
    with node.staging.folder(1 << 20) as folder:
        assert folder is not None
        status = folder.stat()
        assert (status.st_mode & 0o777, status.st_uid) == (0o700, os.geteuid())
        assert not any(folder.iterdir())
        (folder / "file").write_bytes(b"x")
    assert not folder.exists()
    with pytest.raises(ZeroDivisionError), node.staging.folder(0) as folder:
        raise ZeroDivisionError
    assert folder is not None and not folder.exists()


@pytest.mark.parametrize(("limit", "fits"), [(None, True), (4096, True), (4095, False), (0, False)])
def test_the_limit_of_staging(tmp_path: Path, limit: int | None, fits: bool) -> None:
    config = NodeConfig(tmp_path / "state", tmp_path / "run", staging_limit=limit)
    with Node(config) as node, node.staging.folder(4096) as folder:
        assert (folder is not None) == fits


def test_staging_leaves_memory_to_others(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "available_memory", lambda: 8000)
    with node.staging.folder(4000) as folder:
        assert folder is not None
    with node.staging.folder(4001) as folder:
        assert folder is None


def test_only_root_makes_places_for_sockets(node: Node) -> None:
    hooks = node.config.runtime_dir / "hook"
    assert hooks.stat().st_mode & 0o7777 == 0o755
    assert node.store.state.stat().st_mode & 0o777 == 0o700


# -- room for a checkpoint ---------------------------------------------------------------------


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointGroup:
    """A group without processes: its needs are what a test says."""
    monkeypatch.setattr(CheckpointGroup, "owner", 1000)
    return CheckpointGroup(tmp_path, lambda tree: None)


def needs(monkeypatch: pytest.MonkeyPatch, *, host: int = 0, cpu: int = 0, gpu: int = 0) -> None:
    monkeypatch.setattr(
        admission, "_estimate", lambda group, mode, config: admission.Needs(host, cpu, gpu)
    )


def test_a_disk_that_is_too_small(
    node: Node, group: CheckpointGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = node.store.free_bytes()
    needs(monkeypatch, cpu=1000, gpu=free // 2)
    assert check_space(node, group, "stop").gpu == free // 2
    needs(monkeypatch, cpu=free // 2 + 1000, gpu=free // 2)
    with pytest.raises(OutOfSpace, match=r"needs about .* GiB") as raised:
        check_space(node, group, "stop")
    assert str(node.store.state) in str(raised.value)


def test_what_other_images_have_needs_no_room(
    node: Node, group: CheckpointGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How much of it they have is known later, and held against the room again."""
    monkeypatch.setattr(node.store, "free_bytes", lambda: admission._SPARE + 3 * RECORD)
    needs(monkeypatch, gpu=4 * RECORD)
    with pytest.raises(OutOfSpace, match=r"needs about \d+\.\d MiB"):
        check_space(node, group, "stop")
    publish(node.store, bytes(CHUNK) + b"\1" * CHUNK, owner=1000)
    assert check_space(node, group, "stop").room == 3 * RECORD
    with node.store.begin(1000) as writer:
        writer.claim(4)
        writer.limit(6 * RECORD)
        writer.claim(2)
        with pytest.raises(OutOfSpace, match=r"has \d+\.\d MiB that no other image"):
            writer.claim(1)


@pytest.mark.parametrize(
    "kept", [SizeOrShare(size=10_000), SizeOrShare(share=0.1), SizeOrShare(5, 0.1)]
)
def test_what_stays_free_of_a_disk(
    node: Node, group: CheckpointGroup, monkeypatch: pytest.MonkeyPatch, kept: SizeOrShare
) -> None:
    monkeypatch.setattr(node.store, "disk_bytes", lambda: 100_000)
    free = 1 << 30
    monkeypatch.setattr(node.store, "free_bytes", lambda: free)
    most = free - admission._SPARE - 10_000
    needs(monkeypatch, cpu=most)
    assert check_space(node, group, "stop", DiskLimits(kept)).cpu == most
    needs(monkeypatch, cpu=most, gpu=1)
    with pytest.raises(OutOfSpace, match=r"stay free \(min_free\)"):
        check_space(node, group, "stop", DiskLimits(kept))
    assert check_space(node, group, "stop").gpu == 1


def test_too_little_host_memory(
    node: Node, group: CheckpointGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs(monkeypatch, host=available_memory() * 2)
    with pytest.raises(OutOfMemory, match="host memory"):
        check_space(node, group, "driver")


def test_the_estimate_of_a_real_process(group: CheckpointGroup) -> None:
    """A program with 64 MiB of its own needs at least that, whatever its name is."""
    held = bytearray(os.urandom(64 << 20))
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    comm.write_bytes(b"\xff\xfename")
    try:
        assert admission._private_bytes(os.getpid()) >= len(held)
    finally:
        comm.write_bytes(before)
    assert admission._private_bytes(2**22 + 1) == 0


def test_too_little_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mover is started to tell only where it counts what it takes itself."""
    full, empty = (
        GpuInfo(n, f"GPU-{n}", "chip", 80 << 30, memory_used=used)
        for n, used in ((1, 79 << 30), (2, 0))
    )
    unknown = GpuInfo(0, "GPU-0", "chip", 80 << 30)
    monkeypatch.setattr(admission, "list_gpus", lambda: [unknown, full, empty])
    asked = []

    class Mover:
        def free_memory(self) -> tuple[int, int]:
            return 1000, 2000

    class Movers:
        def running(self, gpus: Collection[int]) -> list[Mover]:
            return []

        def mover(self, gpu: int) -> Mover:
            asked.append(gpu)
            return Mover()

    node = cast(Node, SimpleNamespace(movers=Movers(), readied=ReadiedMemory()))
    require_device_memory(node, {0: 1000, 1: 999, 2: 78 << 30})
    assert asked == [0, 1]
    with pytest.raises(OutOfMemory, match="GPU 1"):
        require_device_memory(node, {0: 1000, 1: 1001})
    with pytest.raises(OutOfMemory, match="GPU 2"):
        require_device_memory(node, {2: (78 << 30) + 1})


# -- the machine that an image needs -----------------------------------------------------------

HERE = Host("boot", "6.18", "4.2.1", 13000, ("avx", "sse"), runtime_dir="/run/phos")
HOOKED = Process(
    *(10, 0, 1, "/bin/train", ("train",), 0, 0, (), (10,)), gpu=True, hooked=True, parked=True
)


@pytest.fixture(autouse=True)
def this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "this_host", lambda criu, runtime_dir: HERE)


def made_on(**changes: object) -> Manifest:
    """An image of this machine, or of one that differs from it in this."""
    return Manifest(
        id="20260101T000000-abcd",
        created="",
        mode="stop",
        owner=0,
        host=msgspec.structs.replace(HERE, **changes),
        gpus=(),
        trees=(),
        processes=(HOOKED,),
        blocks=(),
        stop_seconds=0.0,
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"boot_id": "another", "kernel": "6.1"},
        {"driver": 12090},
        {"criu": "4.2"},
        {"criu": "4.1.9"},
        {"cpu_flags": ("sse",)},
        {"runtime_dir": ""},
        {"runtime_dir": "/run/../run/phos"},
    ],
)
def test_a_machine_that_will_do(changes: dict[str, object]) -> None:
    require_same_machine(made_on(**changes), cast(Criu, None), Path("/run/phos"))


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"driver": 13010}, DriverTooOld, "13010, here is 13000"),
        ({"criu": "4.2.2"}, Unsupported, r"CRIU 4\.2\.2, here is 4\.2\.1"),
        ({"criu": "4.10"}, Unsupported, r"CRIU 4\.10"),
        ({"cpu_flags": ("avx", "avx512f")}, Unsupported, "not here: avx512f"),
        ({"runtime_dir": "/run/other"}, Unsupported, "reached in /run/other, and .* in /run/phos"),
    ],
)
def test_a_machine_that_will_not(
    changes: dict[str, object], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        require_same_machine(made_on(**changes), cast(Criu, None), Path("/run/phos"))
