"""A path is opened as a process in another root sees it: no link leads out of that."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from phosd.engine.system.in_root import place_in_root

_FDS = Path("/proc/self/fd")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (root := tmp_path / "root").mkdir()
    (root / "a/b").mkdir(parents=True)
    (root / "a/b/file").write_text("inside")
    (root / "file").write_text("top")
    (tmp_path / "file").write_text("outside")
    (root / "absolute").symlink_to("/a/b")
    (root / "a/up").symlink_to("../../../../file")
    (root / "a/b/back").symlink_to("../up")
    (root / "self").symlink_to("/proc/self/root")
    (root / "loop").symlink_to("loop")
    return root


def held(root: Path) -> list[str]:
    """Return what this process has open there. Earlier tests' descriptors may close at any time."""
    found = []
    for descriptor in _FDS.iterdir():
        with suppress(FileNotFoundError):
            found.append(str(descriptor.readlink()))
    return [path for path in found if path.startswith(str(root.parent))]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("a/b/file", "inside"),
        ("/a//./b/file", "inside"),
        ("a/../../../file", "top"),
        ("absolute/file", "inside"),
        ("absolute/../../file", "top"),
        ("a/up", "top"),
        ("a/b/back", "top"),
        ("self", None),
        ("self/etc/passwd", None),
        ("loop", None),
        ("a/b/file/..", None),
        ("missing", None),
    ],
)
def test_links_stay_inside(root: Path, path: str, content: str | None) -> None:
    folder = os.open(root, os.O_PATH)
    try:
        if content is None:
            with pytest.raises(OSError):
                place_in_root(folder, path, links=True)
        else:
            found = place_in_root(folder, path, links=True)
            assert Path(f"/proc/self/fd/{found}").read_text() == content
            os.close(found)
        assert held(root) == [str(root)], "nothing stays open but the root"
    finally:
        os.close(folder)


@pytest.mark.parametrize("path", ["absolute", "absolute/file", "a/up", "self", "a/b/file/.."])
def test_without_links_there_may_be_none(root: Path, path: str) -> None:
    folder = os.open(root, os.O_PATH)
    with pytest.raises(OSError):
        place_in_root(folder, path)
    os.close(folder)
