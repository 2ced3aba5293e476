"""The table of what the driver does has a probe for each row, a row for each probe, and a page."""

import ast
import re

import pytest

from tests.driver.behaviours import SECTIONS, Behaviour, Section
from tests.driver.page import PAGE, page
from tests.support.checkout import ROOT

ROWS = [row for section in SECTIONS for row in section.rows]


def probes(module: str) -> list[str]:
    """The tests of a module, in their order."""
    found = ast.parse((ROOT / module).read_text()).body
    functions = [node.name for node in found if isinstance(node, ast.FunctionDef)]
    return [name for name in functions if name.startswith("test_")]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_each_row_has_a_probe_and_each_probe_a_row(section: Section) -> None:
    assert probes(section.module) == [row.probe for row in section.rows]


def test_each_module_of_probes_is_in_the_table() -> None:
    modules = [str(path.relative_to(ROOT)) for path in (ROOT / "tests/driver").glob("test_*.py")]
    assert sorted(modules) == sorted(section.module for section in SECTIONS)


def test_ids_name_one_row() -> None:
    ids = [row.id for row in ROWS]
    assert len(set(ids)) == len(ids)
    assert not [each for each in ids if not re.fullmatch(r"[a-z]+(-[a-z]+)*", each)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_a_row_is_one_sentence_and_names_code_that_is_there(row: Behaviour) -> None:
    assert row.says.endswith(".")
    assert ". " not in row.says
    assert row.relied_on_by
    for path in row.relied_on_by:
        assert path.startswith("phosd/"), path
        assert not path.startswith("phosd/softgpu/"), f"{path}: a test double relies on nothing"
        assert (ROOT / path).is_file(), path
    assert all(re.fullmatch(r"\d{3}\.\d+", version) for version in row.seen)


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "`python -m tests.driver.page` writes it again"


def test_rows_that_texts_name_are_there() -> None:
    """Pages link to the table by a row's name, and comments say ``docs/design/driver.md: name``."""
    known = {row.id for row in ROWS}
    pages, code = (ROOT / "docs").rglob("*.md"), (ROOT / "phosd").rglob("*.*")
    named = [re.findall(r"\[`([\w-]+)`\]\([\w./]*driver\.md", path.read_text()) for path in pages]
    for path in code:
        if path.suffix in (".py", ".cpp", ".h"):
            named.append(re.findall(r"design/driver\.md:[\s/#]+([\w-]+)", path.read_text()))
    found = {each for names in named for each in names}
    assert found <= known, found - known
    assert len(found) > 5, "what names rows is not recognised"
