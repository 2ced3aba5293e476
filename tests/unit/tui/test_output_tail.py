"""The end of a program's output: of regular files only, without waiting, safe to show."""

import os
from pathlib import Path

import pytest

from phosd.tui.output_tail import tail


def test_the_last_lines_as_a_terminal_shows_them(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\x1b[31mred\x1b[0m\n 10%\r 50%\r100%\r\n\x1b]0;title\x07\xff\n\tend")
    assert tail(str(path)) == ["red", "100%", "\\x1b]0;title\\x07\ufffd", "    end"]


def test_of_a_large_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    lines = tail(str(path))
    assert lines[-1] == "line 99999" and len(lines) == 200
    path.write_text("x" * 100_000)
    assert tail(str(path)) == []  # the line has no beginning


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    (tmp_path / "secret").write_text("secret")
    link.symlink_to(tmp_path / "secret")
    for path in (pipe, link, tmp_path, Path("/dev/null")):
        assert tail(str(path)) == ["(no regular file)"]
    assert tail(str(tmp_path / "gone")) == ["(No such file or directory)"]


def test_a_file_that_may_not_be_read_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "log"
    path.write_text("x")
    monkeypatch.setattr(os, "pread", refuse)
    assert tail(str(path)) == ["(Permission denied)"]
