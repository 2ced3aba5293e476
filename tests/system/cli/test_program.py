"""The folders of programs' output."""

from pathlib import Path

import pytest

from phosd.cli.run_command.program import Program, output_folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the folders come."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "phos" / "run"


def test_a_program_that_cannot_be_started_leaves_no_folder(runs: Path) -> None:
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            Program.start(["/no/such/program"], {}, output_folder())
    assert list(runs.iterdir()) == []
    program = Program.start(["/bin/true"], {}, output_folder())
    assert program.process.wait() == 0
    assert [path / "stdout" for path in runs.iterdir()] == [program.stdout]


def test_only_the_user_looks_into_the_folders(runs: Path) -> None:
    folder = output_folder()
    assert folder.parent == runs
    for path in (runs.parent, runs, folder):
        assert path.stat().st_mode & 0o777 == 0o700, path
