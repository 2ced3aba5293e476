"""Packs that stay pinned between two images, with a driver that only counts."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phosd.engine.mover.worker import pinned_packs as pinned_packs_module
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.pinned_packs import PinnedPacks, pack_file

SIZE = 4 << 20


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(pinned_packs_module, "call", lambda name, *_, **__: made.append(name))
    return made


@pytest.fixture
def packs(calls: list[str]) -> Iterator[PinnedPacks]:
    made = PinnedPacks(cast(Gpu, SimpleNamespace(attach=lambda: None)))
    yield made
    made.unpin_all()
    assert calls.count("cuMemHostRegister") == calls.count("cuMemHostUnregister")


@pytest.fixture
def pack() -> Iterator[Any]:
    path = Path("/dev/shm") / f"phos-pack-{os.getpid()}"
    with path.open("w+b") as file:
        file.truncate(SIZE)
        yield file
    path.unlink(missing_ok=True)


def test_a_kept_pack_is_not_pinned_again(packs: PinnedPacks, pack: Any, calls: list[str]) -> None:
    packs.unpin(packs.pin([pack.fileno()]), keep=True)
    assert packs.find(pack_file(pack.fileno())) is None
    number = packs.pin([pack.fileno()])
    assert calls == ["cuMemHostRegister"]
    found = packs.find(pack_file(pack.fileno()))
    assert found is not None
    found.view[:3] = b"new"
    assert os.pread(pack.fileno(), 3, 0) == b"new"
    packs.unpin(number)
    assert calls == ["cuMemHostRegister", "cuMemHostUnregister"]


def test_one_that_has_another_size_now_is(packs: PinnedPacks, pack: Any, calls: list[str]) -> None:
    """What was cut off and added again is other memory."""
    packs.unpin(packs.pin([pack.fileno()]), keep=True)
    pack.truncate(2 * SIZE)
    packs.unpin(packs.pin([pack.fileno()]))
    assert calls == ["cuMemHostRegister", "cuMemHostUnregister"] * 2


def test_one_whose_file_is_removed_is_unpinned(
    packs: PinnedPacks, pack: Any, calls: list[str]
) -> None:
    packs.unpin(packs.pin([pack.fileno()]), keep=True)
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    Path(pack.name).unlink()
    packs.pin([])
    assert calls == ["cuMemHostRegister", "cuMemHostUnregister"]
    assert len(os.listdir("/proc/self/fd")) < descriptors  # noqa: PTH208


def test_what_was_not_kept_is_not_pinned_for_a_load(
    packs: PinnedPacks, pack: Any, calls: list[str]
) -> None:
    file = pack_file(pack.fileno())
    packs.unpin(packs.pin([pack.fileno()], kept=True), keep=True)
    assert (calls, packs.find(file)) == ([], None)
    packs.unpin(packs.pin([pack.fileno()]), keep=True)
    number = packs.pin([pack.fileno()], kept=True)
    assert packs.find(file) is not None
    packs.unpin(number, keep=True)
    assert (calls, packs.find(file)) == (["cuMemHostRegister"], None)


def test_one_that_several_use_is_pinned_once(
    packs: PinnedPacks, pack: Any, calls: list[str]
) -> None:
    """It stays for those that are left, also when its file is removed meanwhile."""
    file = pack_file(pack.fileno())
    packs.unpin(packs.pin([pack.fileno()]), keep=True)
    first, second = (packs.pin([pack.fileno()], kept=True) for _ in range(2))
    packs.unpin(first, keep=True)
    Path(pack.name).unlink()
    packs.pin([])
    assert packs.find(file) is not None and calls == ["cuMemHostRegister"]
    packs.unpin(second, keep=True)
    assert packs.find(file) is None
    assert calls == ["cuMemHostRegister", "cuMemHostUnregister"]
