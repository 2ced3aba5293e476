"""Check how comments and docstrings read: ``python -m tests.support.vocabulary``.

A sentence begins with its subject or its verb. One that begins with *Who*, *Whom* or *Of* hides
what it is about; CONTRIBUTING.md has examples. More words come here as texts get rid of them.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.checkout import ROOT

FOLDERS = ("phosd",)
_BEGINNING = re.compile(r"(?:^|(?<=[.!?] ))(?:Who|Whom|Of) ")
_COMMENT = re.compile(r"\s*(?://+|\*)\s?(.*)")


@dataclass(frozen=True)
class Text:
    """A comment or docstring, in one line, and the number of its first line."""

    line: int
    words: str


def python_texts(source: str) -> Iterator[Text]:
    """Yield the docstrings of Python code, those of attributes included, and its comments."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield Text(node.lineno, " ".join(str(node.value.value).split()))
    found: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append((token.start[0], token.string.lstrip("#").strip()))
    yield from _blocks(found)


def native_texts(source: str) -> Iterator[Text]:
    """Yield the comments of C++ code that have lines of their own."""
    lines = enumerate(source.splitlines(), 1)
    yield from _blocks(
        [(number, match[1]) for number, line in lines if (match := _COMMENT.fullmatch(line))]
    )


def _blocks(lines: list[tuple[int, str]]) -> Iterator[Text]:
    """Join comments in lines that follow each other; an empty one ends a paragraph."""
    block: list[tuple[int, str]] = []
    for number, text in [*lines, (-1, "")]:
        if block and (number != block[-1][0] + 1 or not text):
            yield Text(block[0][0], " ".join(each for _, each in block))
            block = []
        if text:
            block.append((number, text))


def findings(root: Path) -> Iterator[str]:
    """Yield what reads badly below ``root``."""
    for path in sorted(each for folder in FOLDERS for each in (root / folder).rglob("*")):
        if path.suffix == ".py":
            texts = python_texts(path.read_text())
        elif path.suffix in (".cpp", ".h"):
            texts = native_texts(path.read_text())
        else:
            continue
        for text in texts:
            for match in _BEGINNING.finditer(text.words):
                shown = text.words[match.start() :][:60]
                yield f"{path.relative_to(root)}:{text.line}: name the subject first: {shown!r}"


def main() -> None:
    if found := [*findings(ROOT)]:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
