"""Check how comments, docstrings and pages read: ``python -m tests.support.vocabulary``.

A sentence begins with its subject or its verb. One that begins with *Who*, *Whom* or *Of* hides
what it is about, unless it asks. An owner stands before what is owned, not behind it. A sentence
says who does something: *have* is for what somebody has, not for what others do for them.
CONTRIBUTING.md has examples. More words come here as texts get rid of them.
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

FOLDERS = ("phosd", "bench", "examples", "packaging", "tests")
PAGES = ("README.md", "CONTRIBUTING.md", "docs", "examples")

_START = r"(?:^|(?<=[.!?:] )|(?<=[.!?]\*\* ))(?:\*\*)?"
_ASKS = r"(?![^.!?]*\?)"
_BEGINNING = re.compile(rf"{_START}(?:Who|Whom|Of) {_ASKS}")
_OWNER = (
    "CRIU|phosd|Slurm|systemd|PyTorch|Python|NVIDIA|runc|crun|podman|containerd|root"
    "|(?:the |a |an |its |their |this |that )?(?:GPU )?(?:driver|kernel|hook|mover|program|process"
    "|user|owner|caller|client|runtime|container|host|machine|compiler|interpreter)"
)
_NO_NOUN = (
    r"[.,;:)(!?]|$| (?:that|which|who|whom|whose|is|are|was|were|has|have|had|in|on|at|to|for|with"
    r"|without|by|from|as|if|when|while|but|than|must|may|can|cannot|does|do|before|after|there"
    r"|until|meanwhile|(?:and|or)(?! (?:the )?\w+'s))\b"
)
_POSSESSIVE = re.compile(
    r"(?<!instead )(?<!place )(?<!third )(?<!half )(?<!quarter )(?<!\dth )"
    rf"\bof (?:{_OWNER})'s(?={_NO_NOUN})"
)
_DONE = (
    r"\w+ed|done|made|taken|written|read|sent|run|go|do|look|give|come|begin|count|call|say"
    "|compute|end|make|take"
)
_CAUSATIVE = re.compile(
    rf"{_START}Have {_ASKS}|(?<![Nn]or )\b(?:have|has|had|having) (?:it|them) (?:{_DONE})\b"
)
_RULES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("name the subject first", _BEGINNING),
    ("put the owner first", _POSSESSIVE),
    ("say who does it", _CAUSATIVE),
)
_COMMENT = re.compile(r"\s*(?://+|\*)\s?(.*)")
_FENCE = re.compile(r"(?ms)^ *```.*?^ *```$")
_SPAN = re.compile(r"`[^`]+`")
_ITEM = re.compile(r"^(?:[-*] |\d+\. |[|#])")


@dataclass(frozen=True)
class Text:
    """A comment, docstring or paragraph, in one line, and the number of its first line."""

    line: int
    words: str


def python_texts(source: str) -> Iterator[Text]:
    """Yield the docstrings of Python code, those of attributes included, its comments, and what it
    passes as ``help`` or ``hint``.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield Text(node.lineno, " ".join(str(node.value.value).split()))
        elif isinstance(node, ast.keyword) and node.arg in ("help", "hint"):
            yield from _passed(node.value)
    found: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append((token.start[0], token.string.lstrip("#").strip()))
    yield from _blocks(found)


def _passed(value: ast.expr) -> Iterator[Text]:
    """Yield a text with or without values in it."""
    parts = value.values if isinstance(value, ast.JoinedStr) else [value]
    said = [str(p.value) if isinstance(p, ast.Constant) else "``" for p in parts]
    if any(isinstance(part, ast.Constant) for part in parts):
        yield Text(value.lineno, " ".join("".join(said).split()))


def page_texts(source: str) -> Iterator[Text]:
    """Yield the paragraphs, items and cells of a Markdown page, without code and headings."""
    plain = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), source)
    block: list[tuple[int, str]] = []
    for number, line in enumerate([*plain.splitlines(), ""], 1):
        words = _SPAN.sub("``", line.strip())
        if not words or _ITEM.match(words):
            if block:
                yield Text(block[0][0], " ".join(each for _, each in block))
            block = []
        if words.startswith("|"):
            yield from (Text(number, cell.strip()) for cell in words.split("|"))
        elif words and not words.startswith("#"):
            block.append((number, _ITEM.sub("", words)))


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


def _texts(root: Path) -> Iterator[tuple[str, Text]]:
    """Yield each text below ``root``, with the path of its file."""
    readers = {".py": python_texts, ".cpp": native_texts, ".h": native_texts}
    for path in sorted(each for folder in FOLDERS for each in (root / folder).rglob("*")):
        if (read := readers.get(path.suffix)) is not None:
            yield from ((str(path.relative_to(root)), text) for text in read(path.read_text()))
    named = [root / page for page in PAGES]
    for path in sorted(
        {page for page in named if page.is_file()} | {f for n in named for f in n.rglob("*.md")}
    ):
        yield from ((str(path.relative_to(root)), text) for text in page_texts(path.read_text()))


def findings(root: Path) -> Iterator[str]:
    """Yield what reads badly below ``root``."""
    for name, text in _texts(root):
        for what, pattern in _RULES:
            for match in pattern.finditer(text.words):
                shown = text.words[match.start() :][:60]
                yield f"{name}:{text.line}: {what}: {shown!r}"


def main() -> None:
    if found := [*findings(ROOT)]:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
