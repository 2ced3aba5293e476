"""The site of ``make docs``: every page has its place in it, and every link leads somewhere."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.packaging.test_pages import PAGES, ROOT
from tests.support.rotation import EVERYTHING


def test_each_page_has_a_place_on_the_site() -> None:
    placed = re.findall(r"(?m): (\S+\.md)$", (ROOT / "mkdocs.yml").read_text())
    assert sorted(placed) == sorted(str(page.relative_to(ROOT)) for page in PAGES)


@pytest.mark.skipif(not EVERYTHING, reason="`make test-all` installs MkDocs")
def test_the_site_is_built_without_a_warning() -> None:
    subprocess.run(["make", "docs"], cwd=ROOT, check=True)
    site = Path(ROOT / "build/site")
    assert (site / "docs/tutorial.html").exists()
    assert "fonts.g" not in (site / "index.html").read_text(), "fonts of another host"
