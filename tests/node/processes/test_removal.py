"""Folders in which others make files are removed with all that is in them."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from phosd.engine.system.removal import remove_trees


def test_a_file_that_was_made_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script that waits for us in CRIU's folder makes one if it is killed at that moment."""
    folder = tmp_path / "criu-1"
    (folder / "a/b").mkdir(parents=True)
    run, calls = subprocess.run, list[list[str]]()

    def beside_the_script(words: list[str], **options: Any) -> Any:
        done = run(words, **options)
        if not calls:
            folder.mkdir()
            (folder / "wake").touch()
        calls.append(words)
        return done

    monkeypatch.setattr(subprocess, "run", beside_the_script)
    remove_trees([folder, tmp_path / "never"])
    assert not folder.exists()
    assert [words[-1] for words in calls] == [str(tmp_path / "never"), str(folder)]


def test_what_cannot_be_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried a few times, and then left."""
    folder = tmp_path / "kept"
    folder.mkdir()
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda words, **_: calls.append(words))
    remove_trees([folder])
    assert folder.exists()
    assert len(calls) == 3
