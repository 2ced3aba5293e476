"""The file system for images in memory, where the kernel does not have all that it would like."""

from pathlib import Path

import pytest

from phosd.engine.system import memory_mount

HUGE = b"huge=within_size"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Options that the kernel refuses; empty: it mounts."""
    words: list[bytes] = []

    def call(name: str, *arguments: bytes | int) -> str:
        assert name == "mount"
        options = arguments[-1]
        assert isinstance(options, bytes)
        return "Invalid argument" if any(word in options for word in words) else ""

    monkeypatch.setattr(memory_mount, "_call", call)
    return words


def test_a_machine_without_huge_pages_does_without(refused: list[bytes], tmp_path: Path) -> None:
    refused.append(HUGE)
    assert memory_mount.mount(tmp_path / "memory") == ""


def test_who_may_not_mount_is_told_why(refused: list[bytes], tmp_path: Path) -> None:
    refused.append(b"mode=700")
    assert memory_mount.mount(tmp_path / "memory") == "Invalid argument"


def test_what_is_not_mounted_cannot_be_unmounted(tmp_path: Path) -> None:
    assert memory_mount.unmount(tmp_path) == "Invalid argument"
