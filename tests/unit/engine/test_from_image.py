"""What the OCI image puts on a host: all of it, and never for what programs have loaded."""

import os
import shutil
from pathlib import Path

import pytest

from phosd.engine.system import from_image
from phosd.errors import Internal


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image of two settings, and of what a host has of phosd."""
    for name in (*(f"share/{each}" for each in from_image._SETTINGS), "phos/python/new.py"):
        (tmp_path / "image" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "image" / name).write_text("new")
    home = tmp_path / "image/phos"
    (home / "kept/second").mkdir(parents=True)
    (home / "hook.so").symlink_to("kept/second/hook.so")
    (home / "image").write_text("2 digest\n")
    return tmp_path / "image"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with another image."""
    found = tmp_path / "host/phos"
    (found / "python").mkdir(parents=True)
    (found / "python/old.py").touch()
    (found / "kept/first").mkdir(parents=True)
    (found / "hook.so").symlink_to("kept/first/hook.so")
    (found / "image").write_text("1 digest\n")
    monkeypatch.setattr(from_image, "HOME", found)
    for name in ("share", "etc"):
        (tmp_path / "host" / name).mkdir()
        monkeypatch.setattr(from_image, name.upper(), tmp_path / "host" / name)
    return found


def test_all_is_replaced_but_what_programs_have_loaded(image: Path, home: Path) -> None:
    loaded = (home / "kept/first").stat().st_ino
    from_image.install(image / "phos", image / "share")
    assert {each.name for each in home.iterdir()} == {"hook.so", "image", "kept", "python"}
    assert [each.name for each in (home / "python").iterdir()] == ["new.py"]
    assert str((home / "hook.so").readlink()) == "kept/second/hook.so"
    assert (home / "kept/first").stat().st_ino == loaded
    assert (home / "image").read_text() == "2 digest\n"
    assert all((from_image.SHARE / each).read_text() == "new" for each in from_image._SETTINGS)


def test_an_installation_that_failed_is_done_again(
    image: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(shutil, "copytree", full)
        with pytest.raises(Internal, match=r"could not be installed on the host.*No space left"):
            from_image.install(image / "phos", image / "share")
    assert (home / "image").read_text() == "unfinished\n"
    assert [each.name for each in (home / "python").iterdir()] == ["old.py"]
    from_image.install(image / "phos", image / "share")
    assert (home / "image").read_text() == "2 digest\n"
    assert [each.name for each in (home / "python").iterdir()] == ["new.py"]


def test_the_same_image_is_not_copied_again(image: Path, home: Path) -> None:
    (home / "image").write_text("2 digest\n")
    from_image.install(image / "phos", image / "share")
    assert (home / "python/old.py").exists()


def test_settings_go_to_etc_where_usr_cannot_be_written(
    image: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_only = os.statvfs_result((*os.statvfs(home)[:8], os.ST_RDONLY, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: read_only)
    from_image.install(image / "phos", image / "share")
    assert [*from_image.SHARE.rglob("*.*")] == []
    assert all((from_image.ETC / each).read_text() == "new" for each in from_image._SETTINGS)
