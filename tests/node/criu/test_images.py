"""A damaged or hostile dump is refused before anything is touched."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from phosd.engine.criu.images.core_image import parent_death_signal
from phosd.engine.image.cpu_manifest import MemoryFile
from phosd.engine.image.manifest import Tree
from phosd.errors import ImageCorrupt, Internal, NotAuthorized
from tests.node.criu.life import COUNTER, Life


@pytest.fixture
def saved(life: Life) -> Life:
    """A dumped and killed program."""
    life.start(COUNTER)
    life.counts_on()
    life.dump()
    life.kill()
    return life


def test_every_flipped_byte_is_found(saved: Life) -> None:
    assert saved.record is not None
    saved.saved_tree.check_bytes()
    for file in saved.record.files:
        path = saved.images / file.path
        original = path.read_bytes()
        for at in {0, len(original) // 2, len(original) - 1}:
            path.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
            with pytest.raises(ImageCorrupt, match=path.name):
                saved.saved_tree.check_bytes()
        path.write_bytes(original)
    saved.saved_tree.check_bytes()


def truncate(folder: Path) -> None:
    os.truncate(folder / "inventory.img", 3)


def remove(folder: Path) -> None:
    (folder / "inventory.img").unlink()


def add(folder: Path) -> None:
    (folder / "more.img").touch()


def link(folder: Path) -> None:
    (folder / "inventory.img").rename(folder.parent / "elsewhere")
    (folder / "inventory.img").symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize("damage", [truncate, remove, add, link])
def test_a_damaged_folder_is_refused_at_admission(
    saved: Life, damage: Callable[[Path], None]
) -> None:
    damage(saved.images)
    with pytest.raises(ImageCorrupt, match=r"inventory\.img|more\.img"):
        saved.admit()


def test_a_file_that_others_may_change_is_refused_at_admission(saved: Life) -> None:
    """As ``phos verify`` refuses it."""
    (saved.images / "inventory.img").chmod(0o666)
    with pytest.raises(NotAuthorized, match=r"inventory\.img is not a file of user 0 alone"):
        saved.admit()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd"])
def test_paths_out_of_the_image_are_refused(saved: Life, name: str) -> None:
    assert saved.record is not None
    (first, *rest) = saved.record.files
    hostile = msgspec.structs.replace(first, path=name)
    saved.record = msgspec.structs.replace(saved.record, files=(hostile, *rest))
    with pytest.raises(ImageCorrupt, match="names a file outside"):
        saved.admit()


@pytest.mark.parametrize("saved_at", ["../secret", "/etc/shadow", "memory/../../secret"])
def test_saved_bytes_outside_of_the_image_are_refused(saved: Life, saved_at: str) -> None:
    assert saved.record is not None
    assert saved.record.details is not None
    file = MemoryFile(path="/dev/shm/x", saved=saved_at, size=4, mode=0o600)
    details = msgspec.structs.replace(saved.record.details, memory_files=(file,))
    saved.record = msgspec.structs.replace(saved.record, details=details)
    with pytest.raises(ImageCorrupt, match="names a file outside"):
        saved.admit()


def test_the_record_survives_the_manifests_encoding(saved: Life) -> None:
    assert saved.record is not None
    again = msgspec.json.decode(msgspec.json.encode(saved.record), type=Tree)
    assert again == saved.record


def test_a_truncated_core_image_is_an_error(saved: Life, tmp_path: Path) -> None:
    original = (saved.images / f"core-{saved.pid}.img").read_bytes()
    assert parent_death_signal(saved.images / f"core-{saved.pid}.img") == 0
    path = tmp_path / "core.img"
    path.write_bytes(original[:10])
    with pytest.raises(Internal, match=r"core\.img is not an image"):
        parent_death_signal(path)
