"""Check that files and functions are short: ``python -m tests.support.lengths``.

A file tells one thing, in at most 400 lines, and a function does one, in at most 60. The decorators
and the docstring of a function are left out: those of a command are its options and its help. In
C++ only files are measured.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.checkout import ROOT

MOST_OF_FILE, MOST_OF_FUNCTION = 400, 60
FOLDERS = ("phosd", "bench", "packaging", "examples")
_NATIVE = (".cpp", ".h", ".cu")
EXCEPTIONS: Mapping[str, str] = {
    "phosd/cli/json_rows.py": "a table: the keys of each line of `phos --json`",
    "phosd/tui/actions.py": "a table: all actions, with their keys and what help says",
    "phosd/service/history/schema.py:m001_tables": "a table: the columns of the first schema",
}
"""What may be longer, as ``file`` or ``file:function``, and why."""


@dataclass(frozen=True)
class Long:
    """A file, or a function in it, that has more than ``most`` lines. ``name`` is as in
    :data:`EXCEPTIONS`.
    """

    name: str
    line: int
    length: int
    most: int

    def __str__(self) -> str:
        file, _, function = self.name.partition(":")
        way_out = "name its steps" if function else "split it along what it tells"
        return (
            f"{file}:{self.line}: {function or 'it'} has {self.length} lines, and the limit is "
            f"{self.most}: {way_out}, or say in tests/support/lengths.py why it may be longer"
        )


def long_ones(root: Path) -> Iterator[Long]:
    """Yield the files and functions below ``root`` that are too long."""
    for path in sorted(each for folder in FOLDERS for each in (root / folder).rglob("*")):
        if path.suffix != ".py" and path.suffix not in _NATIVE:
            continue
        text, name = path.read_text(), str(path.relative_to(root))
        if (lines := len(text.splitlines())) > MOST_OF_FILE:
            yield Long(name, 1, lines, MOST_OF_FILE)
        if path.suffix == ".py" and lines > MOST_OF_FUNCTION:
            for function in _functions(ast.parse(text)):
                if (length := _length(function)) > MOST_OF_FUNCTION:
                    place = f"{name}:{function.name}"
                    yield Long(place, function.lineno, length, MOST_OF_FUNCTION)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function from its ``def`` on, without its docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def problems(root: Path, exceptions: Mapping[str, str]) -> list[str]:
    """Return what is too long and no exception, and exceptions that are not needed any more."""
    found = {each.name: each for each in long_ones(root)}
    return [
        *(str(each) for name, each in found.items() if name not in exceptions),
        *(
            f"tests/support/lengths.py: {name} is short now: take it out of EXCEPTIONS"
            for name in exceptions
            if name not in found
        ),
    ]


def main() -> None:
    if found := problems(ROOT, EXCEPTIONS):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
