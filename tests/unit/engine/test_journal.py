"""Records of jobs that a phosd was killed over writing."""

from pathlib import Path

from phosd.engine.job.journal import Journal


def test_a_record_that_was_written_in_half_is_removed(tmp_path: Path) -> None:
    """It would stay for ever: job numbers do not come again."""
    folder = tmp_path / "journal"
    journal = Journal(folder)
    (folder / "7.new").write_bytes(b'{"job":')
    assert journal.interrupted() == []
    assert list(folder.iterdir()) == []
