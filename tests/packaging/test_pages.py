"""The Markdown pages: links resolve, and the files, commands, options, D-Bus members, tests and
modules that they name exist.
"""

import ast
import importlib.util
import itertools
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from phosd.cli.main import main as phos
from phosd.cli.main import named
from phosd.interface.methods import INTERFACES
from phosd.service.main import parser as phosd_parser
from phosd.tui.main import main as phos_tui

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")],
    key=lambda page: str(page.relative_to(ROOT)),
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(?ms)^ *```.*?^ *```$")
_SPAN = re.compile(r"`([^`\n]+)`")
_OURS = re.compile(r"^(?:phosd|tests|bench|docs|packaging|systemd|examples)/[\w./@-]*[\w/]")
_BUILT = ("phosd/native/",)
"""What `make build` makes, and a checkout has not."""
_OPTION = re.compile(r"^-{1,2}[a-z][a-z-]*")
_PROMPT = re.compile(r"^(?:\w+)?[$#] ")
"""The prompt of a shell in an example: a user, root, or a user of a node that is named."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text: str) -> str:
    return _SPAN.sub("", _FENCE.sub("", text))


def code(page: Path) -> Iterator[str]:
    """The lines of code blocks, and what stands in backquotes."""
    text = page.read_text()
    for block in _FENCE.findall(text):
        yield from block.splitlines()[1:-1]
    yield from re.findall(r"(?m)^ {4}(\S.*)$", _FENCE.sub("", text))
    yield from _SPAN.findall(_FENCE.sub("", text))


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of ours that a page shows, without what the shell adds."""
    for line in code(page):
        line = _PROMPT.sub("", line).split(" #")[0].split("|")[0]
        for part in re.split(r"&&?|;", line):
            try:
                words = shlex.split(part.replace("$PWD/", ""))
            except ValueError:
                continue  # a line of a script, of JavaScript perhaps
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", _FENCE.sub("", page.read_text()))
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    for line in code(page):
        for word in re.split(r"[\s=]+", line):
            found = _OURS.match(word)
            if found and not word.startswith(_BUILT):
                assert (ROOT / found[0]).exists(), word


def test_the_index_has_every_page() -> None:
    index = DOCS / "README.md"
    linked = {(DOCS / link.split("#")[0]).resolve() for link in _LINK.findall(index.read_text())}
    assert not [page for page in DOCS.rglob("*.md") if page != index and page not in linked]


@each_page
def test_commands_that_are_shown_exist(page: Path) -> None:
    for words in commands(page):
        check = _CHECKS.get(words[0])
        if check is not None:
            check(words)


def options_of(command: click.Command) -> set[str]:
    return {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)} | {
        "-h",
        "--help",
    }


def given(words: list[str]) -> list[str]:
    """The options among words, before a ``--`` behind which another command stands."""
    ours = words[: words.index("--")] if "--" in words else words
    return [found[0] for word in ours if (found := _OPTION.match(word))]


def check_phos(words: list[str]) -> None:
    behind = itertools.pairwise(words)
    rest = [word for before, word in behind if before != "-H" and not word.startswith("-")]
    flags = options_of(phos)
    if rest and rest[0] != "...":
        assert rest[0] in phos.commands, words
        flags |= options_of(named(rest[0]))
    assert set(given(words)) <= flags, words


def check_phos_tui(words: list[str]) -> None:
    assert set(given(words)) <= options_of(phos_tui), words


def check_phosd(words: list[str]) -> None:
    flags = {flag for action in phosd_parser()._actions for flag in action.option_strings}
    assert set(given(words)) <= flags, words


def check_make(words: list[str]) -> None:
    targets = set(re.findall(r"(?m)^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text()))
    known = {target for line in targets for target in line.split()}
    assert {word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)} <= known, words


def check_python(words: list[str]) -> None:
    """Modules and scripts of ours, with options that stand in their text."""
    if (
        len(words) > 2
        and words[1] == "-m"
        and words[2].split(".")[0] in {"phosd", "bench", "tests"}
    ):
        spec = importlib.util.find_spec(words[2])
        assert spec is not None, words
        assert spec.origin is not None
        script = Path(spec.origin)
    elif len(words) > 1 and _OURS.match(words[1]):
        script = ROOT / words[1]
    else:
        return
    text = script.read_text()
    if "add_options(parser)" in text:  # those of every bench of everything together
        text += (ROOT / "bench/stage.py").read_text()
    for flag in given(words[2:]):
        assert flag == "-m" or f'"{flag}"' in text, words


def check_busctl(words: list[str]) -> None:
    """``busctl call NAME PATH INTERFACE MEMBER SIGNATURE ...`` and ``get-property`` of ours."""
    rest = [word for word in words[1:] if not word.startswith("-")]
    if len(rest) < 5 or rest[1] != "org.phos":
        return
    (interface,) = (each for each in INTERFACES if each.name == rest[3])
    if rest[0] == "call":
        assert rest[5] == interface.method(rest[4]).signature, words
    else:
        assert rest[4] in {each.name for each in interface.properties}, words


_CHECKS = {
    "phos": check_phos,
    "phos-tui": check_phos_tui,
    "phosd": check_phosd,
    "make": check_make,
    "python": check_python,
    "busctl": check_busctl,
}


@cache
def texts_of_tests() -> str:
    """The text of all tests, Python's and the native ones'."""
    folders = (ROOT / "tests", ROOT / "phosd/hook/tests", ROOT / "phosd/softgpu")
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return "\n".join(path.read_text() for path in paths if path.suffix in (".py", ".cpp"))


@each_page
def test_tests_that_are_named_exist(page: Path) -> None:
    names = set(re.findall(r"`(test_\w+)`", page.read_text()))
    names |= set(re.findall(r"`(\w+)` \(native\)", page.read_text()))
    for name in names:
        assert re.search(rf"\b{name}\b", texts_of_tests()), name


@cache
def texts_of_phosd() -> str:
    """Each text in phosd's Python in a line of its own, with `…` where it takes a value."""
    found = []
    for path in (ROOT / "phosd").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", "…") for part in node.values]
                found.append("".join(part if isinstance(part, str) else "…" for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(" ".join(text.split()) for text in found)


def test_messages_that_are_explained_exist() -> None:
    messages = re.findall(r"(?m)^\| `([^`]+ [^`]+)` \|", (DOCS / "messages.md").read_text())
    assert len(messages) > 50
    for message in messages:
        text = ".*?".join(re.escape(part) for part in message.split("…") if part)
        assert re.search(text, texts_of_phosd()), message


@pytest.mark.parametrize("name", ["hazards", "architecture"])
def test_what_keeps_a_rule_exists(name: str) -> None:
    """Behind "Kept by" stand modules of the engine or the service, and files of the hook."""
    rules = re.findall(
        r"(?s)Kept by:?\*? (.*?)(?=\n\d+\.|\n\n|\*Tests?:)",
        (DOCS / f"design/{name}.md").read_text(),
    )
    assert len(rules) > 10
    for place in {
        place for rule in rules for place in re.findall(r"`([a-z_]+[./][a-z_./]+)`", rule)
    }:
        path = place.replace(".", "/")
        homes = [ROOT / "phosd" / home / path for home in ("engine", "service", "hook", ".")]
        assert any(home.is_dir() or [*home.parent.glob(f"{home.name}.*")] for home in homes), place
