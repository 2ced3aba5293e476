"""The check of commit messages: an area, a length, and nothing that git writes is in its way."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "packaging/check_commit_message.py"
_CHECK = runpy.run_path(str(SCRIPT))  # a module called packaging is somebody else's
MOST: int = _CHECK["MOST"]


def problems(message: str) -> list[str]:
    found: list[str] = _CHECK["problems"](message)
    return found


@pytest.mark.parametrize(
    "message",
    [
        "Engine: the gate opens when the job is cancelled\n",
        "phos-tui: a key\n\nIt was asked for.\n",
        "docs/design: phases in one table",
        "Software GPU: prmt.b32\n\n# Please enter the commit message\n",
        "D-Bus (Manager1): an option",
        "fixup! Engine: " + "x" * (MOST - len("Engine: ")),
        "Hook: " + "x" * (MOST - len("Hook: ")),
        'Revert "Engine: ' + "x" * MOST + '"\n\nThis reverts commit 0.\n',
        "Merge branch 'next'",
        "\n\nTests: what comes first counts\n",
        f"Tests: a diff is shown\n# {'-' * 24} >8 {'-' * 24}\ndiff without an empty line\n",
    ],
)
def test_a_message_that_is_fine(message: str) -> None:
    assert problems(message) == []


@pytest.mark.parametrize(
    ("message", "what"),
    [
        ("", "empty"),
        ("# only a comment\n", "empty"),
        ("A subject without an area", "no area"),
        ("One two three four five: an area that is a sentence", "no area"),
        ("Engine:", "no area"),
        ("Engine:no space", "no area"),
        ("Engine: " + "x" * (MOST - len("Engine: ") + 1), f"{MOST + 1} characters"),
        ("Engine: an end.", "full stop"),
        ("Engine: a subject\nand no empty line", "not empty"),
    ],
)
def test_a_message_that_is_refused(message: str, what: str) -> None:
    (found,) = problems(message)
    assert what in found


def test_all_mistakes_are_told_at_once() -> None:
    assert len(problems("x" * (MOST + 1) + ".\ny")) == 4


def test_characters_are_counted_and_not_bytes() -> None:
    assert problems("Docs: " + "\u00fc" * (MOST - len("Docs: "))) == []


@pytest.mark.parametrize(("subject", "status"), [("Docs: one", 0), ("no area", 1)])
def test_as_git_calls_it(tmp_path: Path, subject: str, status: int) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text(subject)
    done = subprocess.run([sys.executable, SCRIPT, message], capture_output=True, text=True)
    assert done.returncode == status
    assert bool(done.stderr) == bool(status)
