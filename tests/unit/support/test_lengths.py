"""Files and functions have a length, and what is longer has a reason."""

from pathlib import Path

import pytest

from tests.support import lengths

FILE, FUNCTION = lengths.MOST_OF_FILE, lengths.MOST_OF_FUNCTION


def written(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def function(lines: int, before: str = "", docstring: str = "") -> str:
    """Return a function whose ``def`` and body have so many lines."""
    return f"{before}def f():\n{docstring}" + "    pass\n" * (lines - 1)


@pytest.mark.parametrize("name", ["phosd/a.py", "bench/a.py", "phosd/hook/a.cpp", "phosd/hook/a.h"])
def test_a_file_is_short(tmp_path: Path, name: str) -> None:
    written(tmp_path, name, "\n" * FILE)
    assert lengths.problems(tmp_path, {}) == []
    written(tmp_path, name, "\n" * (FILE + 1))
    (problem,) = lengths.problems(tmp_path, {})
    assert problem.startswith(f"{name}:1: it has {FILE + 1} lines, and the limit is {FILE}: ")


@pytest.mark.parametrize("before", ["", "async ", "class A:\n  "])
def test_a_function_is_short(tmp_path: Path, before: str) -> None:
    written(tmp_path, "phosd/a.py", function(FUNCTION, before))
    assert lengths.problems(tmp_path, {}) == []
    written(tmp_path, "phosd/a.py", "\n\n" + function(FUNCTION + 1, before))
    (problem,) = lengths.problems(tmp_path, {})
    line = 3 + before.count("\n")
    assert problem.startswith(f"phosd/a.py:{line}: f has {FUNCTION + 1} lines, and the limit is ")


def test_the_options_and_the_help_of_a_command_are_not_counted(tmp_path: Path) -> None:
    decorators, help_text = "@option(\n    1,\n)\n" * 9, '    """Say\n\n    how.\n    """\n'
    written(tmp_path, "phosd/a.py", function(FUNCTION, decorators, help_text))
    assert lengths.problems(tmp_path, {}) == []


def test_other_folders_and_files_are_as_long_as_they_are(tmp_path: Path) -> None:
    for name in ("tests/a.py", "phosd/hook/hooks.def", "docs/a.md"):
        written(tmp_path, name, "\n" * (FILE + 1))
    assert lengths.problems(tmp_path, {}) == []


def test_an_exception_is_needed(tmp_path: Path) -> None:
    exceptions = {"phosd/a.py": "a table", "phosd/b.py:f": "a table"}
    written(tmp_path, "phosd/a.py", "\n" * (FILE + 1))
    written(tmp_path, "phosd/b.py", function(FUNCTION + 1))
    assert lengths.problems(tmp_path, exceptions) == []
    written(tmp_path, "phosd/b.py", function(FUNCTION))
    (problem,) = lengths.problems(tmp_path, exceptions)
    assert "phosd/b.py:f is short now" in problem


def test_main_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "problems", lambda root, exceptions: ["a", "b"])
    with pytest.raises(SystemExit, match="a\nb"):
        lengths.main()


def test_each_exception_has_a_reason() -> None:
    assert all(lengths.EXCEPTIONS.values())
