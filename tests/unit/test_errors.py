"""Errors for programs: each ``Unsupported`` has a code, the same in the hook and on the page."""

import ast
import re
from pathlib import Path

import pytest

from phosd import errors
from phosd.errors import Busy, NotAuthorized, OtherError, PhosError, Reason, Unsupported, named

ROOT = Path(__file__).parents[2]


def test_each_unsupported_has_a_reason() -> None:
    without = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "phosd").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Unsupported"
        and not any(keyword.arg == "reason" for keyword in node.keywords)
    ]
    assert without == []


def test_the_hook_has_no_other_codes() -> None:
    text = (ROOT / "phosd/hook/reasons.def").read_text()
    codes = re.findall(r'PHOS_REASON\(\w+, "([^"]+)"\)', text)
    assert codes == list(Reason)[: len(codes)] and codes


def test_the_reference_explains_each_code_and_no_other() -> None:
    page = (ROOT / "docs/reference/dbus.md").read_text()
    table = page.partition("| reason | |\n| --- | --- |\n")[2].partition("\n\n")[0]
    assert re.findall(r"(?m)^\| `([a-z-]+)` \| .+ \|$", table) == list(Reason)


def test_codes_are_short_words() -> None:
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+){0,2}", code) for code in Reason)


def test_an_error_is_named_again() -> None:
    error = named("Unsupported", "it uses it", "do without", reason="multicast")
    assert type(error) is Unsupported
    assert (error.reason, error.hint, str(error)) == (
        "multicast",
        "do without",
        "it uses it; do without",
    )
    assert type(named("NotAuthorized", "no")) is NotAuthorized


@pytest.mark.parametrize("name", ["NoSuchThing", "OtherError", "PhosError", "Path", ""])
def test_an_error_of_a_newer_phosd_keeps_its_name(name: str) -> None:
    error = named(name, "what", "hint", reason="new-code")
    assert type(error) is OtherError
    assert (error.code, error.reason, str(error)) == (name, "new-code", "what; hint")


def test_the_reference_names_each_error_of_a_call() -> None:
    page = (ROOT / "docs/reference/dbus.md").read_text()
    listed = set(re.findall(r"`(\w+)`", page.partition("and one of ")[2].partition(". ")[0]))
    kinds = {
        kind.__name__ for kind in PhosError.__subclasses__() if kind.__module__ == errors.__name__
    }
    assert listed == kinds - {"NoBus", "NoDaemon", "OtherError", "RemoteFailed"}  # of the client


def test_an_error_without_a_reason_has_an_empty_one() -> None:
    assert Busy("it is held").reason == ""
