"""The reference of the Python API is that of the sources, and says something of each name."""

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

import phosd.client
import phosd.engine

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/python.md").read_text()


@pytest.fixture(scope="module")
def make_api() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "packaging/make_api.py"))


def test_the_page_is_up_to_date(make_api: dict[str, Any]) -> None:
    assert make_api["page"](PAGE) == PAGE, "`python packaging/make_pages.py` writes it again"


@pytest.mark.parametrize("package", [phosd.client, phosd.engine])
def test_each_name_is_there_once_and_has_a_docstring(package: Any) -> None:
    section = PAGE.partition(f"\n## `{package.__name__}`\n")[2].partition("\n## ")[0]
    assert package.__all__ == sorted(set(package.__all__))
    for name in package.__all__:
        assert section.count(f"\n### `{name}`\n") == 1
        if name != "Record":
            assert getattr(package, name).__doc__, name


def test_a_page_without_marks_is_refused(make_api: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="put back"):
        make_api["page"]("# A page\n")


def test_a_signature_is_as_in_the_source(make_api: dict[str, Any]) -> None:
    source = (
        "def f(self, a: 'B', b: int = 1, *, c: str | None = None, **d: int) -> 'C':\n    'It is'"
    )
    (node,) = ast.parse(source).body
    lines = list(make_api["entry"](make_api["Export"]("f", node)))
    assert "    def f(a: B, b: int = 1, *, c: str | None = None, **d: int) -> C" in lines


def test_the_code_of_the_page_runs_as_far_as_it_can(make_api: dict[str, Any]) -> None:
    """Each block compiles, and what it imports of ours is exported."""
    blocks = PAGE.split("```python\n")[1:]
    assert len(blocks) > 4
    for block in blocks:
        for node in ast.walk(ast.parse(block.partition("```")[0])):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("phosd"):
                module = __import__(str(node.module), fromlist=["_"])
                assert all(hasattr(module, alias.name) for alias in node.names)
