"""The words that comments, docstrings, help texts and pages may not use, or not begin with."""

from pathlib import Path

import pytest

from tests.support import vocabulary


def found_in(folder: Path, name: str, text: str) -> list[str]:
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return [*vocabulary.findings(folder)]


@pytest.mark.parametrize(
    "text",
    [
        '"""Who reads this is lost."""\n',
        'limit = 3\n"""Of one process."""\n',
        'def one() -> None:\n    """Do it. Whom it concerns is not said."""\n',
        'class One:\n    """One.\n\n    Of others\n    this is not known.\n    """\n',
        "# Who asks\n# gets it.\n",
        "one = 1\n# It is one.\n# Of others nothing is known.\n",
        'fail("it cannot be done", hint=f"ask {whom}. Of others nothing is known")\n',
    ],
)
def test_a_sentence_names_its_subject_first(tmp_path: Path, text: str) -> None:
    assert len(found_in(tmp_path, "phosd/one.py", text)) == 1


@pytest.mark.parametrize(
    "words",
    [
        "A file of CRIU's, which is read.",
        "A step of Slurm's that is frozen.",
        "It is a setuid program of root's.",
        "Devices of the GPU driver's are open.",
        "It is in the folder of a user's",
    ],
)
def test_an_owner_stands_first(tmp_path: Path, words: str) -> None:
    (found,) = found_in(tmp_path, "bench/one.py", f"# {words}\n")
    assert found.startswith("bench/one.py:1: put the owner first: ")


@pytest.mark.parametrize(
    "words",
    [
        "Have the kernel drop what it keeps.",
        "It is done. Have no hook asked any more.",
        "It reads them, and has them counted.",
        "Start it anew to have it saved.",
        "A reload has it read the file again.",
    ],
)
def test_a_sentence_says_who_does_it(tmp_path: Path, words: str) -> None:
    (found,) = found_in(tmp_path, "docs/design/page.md", f"# Page\n\n- {words}\n")
    assert found.startswith("docs/design/page.md:3: say who does it: ")


@pytest.mark.parametrize(
    "text", ["// Who asks gets it.\nint one;\n", "    // It is.\n    // Of one\n    // process.\n"]
)
def test_in_native_code_too(tmp_path: Path, text: str) -> None:
    (found,) = found_in(tmp_path, "phosd/one.cpp", text)
    assert found.startswith("phosd/one.cpp:1: ")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("It is so. Who asks\ngets it.\n", 1),
        ("# Title\n\n1. One.\n2. Of two. It is.\n", 4),
        ("| a | b |\n| --- | --- |\n| one | it is. Who asks gets it |\n", 3),
        ("**Who asks** gets it.\n", 1),
    ],
)
def test_on_pages_too(tmp_path: Path, text: str, line: int) -> None:
    (found,) = found_in(tmp_path, "docs/page.md", text)
    assert found.startswith(f"docs/page.md:{line}: ")


def test_what_reads_well(tmp_path: Path) -> None:
    text = '"""Say who asks, and of what."""\n\nOf = "Of one"\nprint("Who asks")  # so be it\n'
    text += "# The driver's own or the hook's; half of the driver's; its own instead of root's.\n"
    text += "# A part of CRIU's and phosd's files, and of the program's own.\n"
    text += "# It has it open. Nor has it pinned memory. A user may have them there.\n"
    assert not found_in(tmp_path, "phosd/one.py", text)
    (tmp_path / "phosd/one.h").write_text("int one;  // Whose it is.\n\n// Office.\n")
    (tmp_path / "README.md").write_text(
        "# Who may do what\n\nWho may save it?\n\n`a file of CRIU's`\n\n```\nOf what\n```\n"
    )
    assert not [*vocabulary.findings(tmp_path)]
