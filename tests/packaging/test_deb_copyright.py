"""What the package's copyright file says of each part, and that a part without terms is refused."""

import json
import re
from pathlib import Path

import pytest

from tests.support.scripts import load

deb_copyright = load("deb_copyright")


def distribution(folder: Path, name: str, files: dict[str, str], metadata: str = "") -> None:
    """An installed Python distribution; ``files`` are beside its metadata."""
    info = f"{name}-1.0.dist-info"
    files = {f"{info}/METADATA": f"Name: {name}\nVersion: 1.0\n{metadata}", **files}
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    (folder / info / "RECORD").write_text(record)


def test_a_distribution_is_named_with_its_files_and_terms(tmp_path: Path) -> None:
    terms = "Copyright (c) 2020 Ann\n\nDo as you like.\n"
    files = {"one/a.py": "", "one/b.py": "", "one-1.0.dist-info/licenses/LICENSE": terms}
    distribution(tmp_path, "one", files, "License-Expression: MIT AND 0BSD\n")
    (one,) = deb_copyright.of_python(tmp_path, "usr/lib/p")
    assert one.files == ["usr/lib/p/one-1.0.dist-info/*", "usr/lib/p/one/*"]
    assert (one.licence, one.holders) == ("MIT and 0BSD", ["Copyright (c) 2020 Ann"])
    text = deb_copyright.write([one])
    paragraph = text.split("\n\n")[-1]
    assert "\n  Copyright (c) 2020 Ann\n .\n  Do as you like.\n" in paragraph


def test_distributions_that_share_a_folder_have_the_parts_that_are_theirs(tmp_path: Path) -> None:
    for name in ("red", "blue"):
        licence = f"{name}-1.0.dist-info/LICENSE"
        distribution(tmp_path, name, {f"shared/{name}/a.py": "", licence: "(c) 2020 Bob"})
    found = {each.origin.split()[0]: each.files for each in deb_copyright.of_python(tmp_path, "p")}
    assert found["red"] == ["p/red-1.0.dist-info/*", "p/shared/red/*"]
    assert found["blue"] == ["p/blue-1.0.dist-info/*", "p/shared/blue/*"]


def test_terms_may_be_at_the_beginning_of_a_module(tmp_path: Path) -> None:
    source = (
        "#####\n# Copyright (c) 2020, Somebody\n# Redistribution is permitted.\n##\nimport os\n"
    )
    distribution(tmp_path, "bare", {"bare.py": source}, "License: BSD\n")
    (bare,) = deb_copyright.of_python(tmp_path, "p")
    assert "Redistribution is permitted." in bare.text
    assert "import os" not in bare.text
    assert bare.licence == "BSD"


def test_a_distribution_without_terms_is_refused_by_name(tmp_path: Path) -> None:
    distribution(tmp_path, "nobodys", {"nobodys.py": "# what it does\n"}, "License: MIT\n")
    with pytest.raises(deb_copyright.Unlicensed, match=r"nobodys 1\.0 brings no licence"):
        list(deb_copyright.of_python(tmp_path, "p"))


def test_the_apache_licence_is_named_and_not_repeated(tmp_path: Path) -> None:
    licence = (Path(__file__).parents[2] / "LICENSE").read_text()
    files = {"two/a.py": "", "two-1.0.dist-info/LICENSE": f"(c) 2021 Cid\n\n{licence}\nAnd more.\n"}
    distribution(tmp_path, "two", files)
    text = deb_copyright.write(deb_copyright.of_python(tmp_path, "p"))
    assert "TERMS AND CONDITIONS FOR USE" not in text
    assert text.count("/usr/share/common-licenses/Apache-2.0") == 2
    assert "(c) 2021 Cid" in text
    assert "And more." in text


def test_a_debian_package_is_named_with_where_its_source_is(tmp_path: Path) -> None:
    package = {"name": "libx1", "source": "x", "version": "1:2-3", "files": ["lib/libx.so.1"]}
    (tmp_path / "packages.json").write_text(json.dumps([package]))
    (tmp_path / "copyright").mkdir()
    terms = "Format: f\n\nFiles: *\nCopyright: A\nLicense: GPL-2 or MIT\n\nFiles: b\nLicense: ISC\n"
    (tmp_path / "copyright/libx1").write_text(terms)
    (component,) = deb_copyright.of_debian(tmp_path, "usr/lib/phos/criu")
    assert component.files == ["usr/lib/phos/criu/lib/libx.so.1"]
    assert component.licence == "GPL-2 or MIT, and ISC"
    paragraph = deb_copyright.write([component]).split("\n\n")[-1]
    assert "https://snapshot.debian.org/package/x/1:2-3/" in paragraph
    assert re.search(r"(?m)^  License: ISC$", paragraph), "the whole text, in one field"


def test_the_libraries_of_the_compiler_need_their_terms() -> None:
    with pytest.raises(deb_copyright.Unlicensed, match="install libgcc-99-dev"):
        deb_copyright.of_gcc("99", ["a.so"])
