"""The folders where hooks listen, in which users may make what they like."""

import os
import stat
from pathlib import Path

from phosd.engine.hook_client import places

USER = 54321


def test_nobody_keeps_the_folder_of_pid_namespaces(tmp_path: Path) -> None:
    """It cannot be entered, and what was in its place before is not followed."""
    hooks = places.hooks_folder(tmp_path)
    hooks.mkdir()
    hooks.chmod(0o1777)
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (hooks / "pidns").symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        folder = places.namespaces_folder(tmp_path)
        status = folder.lstat()
        assert stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
        folder.rmdir()
        folder.mkdir()
        os.chown(folder, USER, USER)


def test_what_an_ended_namespace_has_left_is_removed_however_deep(tmp_path: Path) -> None:
    folder = places.hooks_folder(tmp_path)
    folder.mkdir()
    folder = places.namespaces_folder(tmp_path) / "1234"
    folder.mkdir()
    at = os.open(folder, os.O_PATH)
    for _ in range(3000):
        os.mkdir("a", dir_fd=at)
        below = os.open("a", os.O_PATH, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    places.sweep(tmp_path)
    assert not folder.exists()
