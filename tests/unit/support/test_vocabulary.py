"""The words that sentences of comments and docstrings may not begin with."""

from pathlib import Path

import pytest

from tests.support import vocabulary


@pytest.mark.parametrize(
    "text",
    [
        '"""Who reads this is lost."""\n',
        'limit = 3\n"""Of one process."""\n',
        'def one() -> None:\n    """Do it. Whom it concerns is not said."""\n',
        'class One:\n    """One.\n\n    Of others\n    this is not known.\n    """\n',
        "# Who asks\n# gets it.\n",
        "one = 1\n# It is one.\n# Of others nothing is known.\n",
    ],
)
def test_a_sentence_names_its_subject_first(tmp_path: Path, text: str) -> None:
    (tmp_path / "phosd").mkdir()
    (tmp_path / "phosd/one.py").write_text(text)
    assert len([*vocabulary.findings(tmp_path)]) == 1


@pytest.mark.parametrize(
    "text", ["// Who asks gets it.\nint one;\n", "    // It is.\n    // Of one\n    // process.\n"]
)
def test_in_native_code_too(tmp_path: Path, text: str) -> None:
    (tmp_path / "phosd").mkdir()
    (tmp_path / "phosd/one.cpp").write_text(text)
    (found,) = vocabulary.findings(tmp_path)
    assert found.startswith("phosd/one.cpp:1: ")


def test_what_reads_well(tmp_path: Path) -> None:
    (tmp_path / "phosd").mkdir()
    (tmp_path / "phosd/one.py").write_text(
        '"""Say who asks, and of what."""\n\nOf = "Of one"\nprint("Who asks")  # so be it\n'
    )
    (tmp_path / "phosd/one.h").write_text("int one;  // Whose it is.\n\n// Office.\n")
    assert not [*vocabulary.findings(tmp_path)]
