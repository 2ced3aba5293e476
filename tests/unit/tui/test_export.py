"""The history as a file."""

import csv
import json
import os
import resource
import signal
from pathlib import Path

import pytest

from phosd.tui import export
from tests.support.tui.fakes import NOW
from tests.unit.tui.test_past import ROW


def test_a_table_has_a_line_a_job_and_times_in_utc(tmp_path: Path) -> None:
    odd = ROW | {"id": 13, "message": 'with "quotes",\nand a line', "ended": None}
    path = export.write(str(tmp_path / "x.csv"), [ROW, odd, {"id": 14}])
    with path.open(newline="") as file:
        first, second, third = csv.DictReader(file)
    assert first["started"] == "2027-01-15T07:59:00.000+00:00"
    assert (first["stop_seconds"], first["drained_bytes"]) == ("0.84", str(40 << 30))
    assert second["message"] == odd["message"] and second["ended"] == ""
    assert third["id"] == "14" and third["operation"] == ""


def test_json_has_all_that_phosd_tells(tmp_path: Path) -> None:
    path = export.write(str(tmp_path / "x.json"), [ROW])
    (row,) = json.loads(path.read_text())
    assert row["target"] == "4711"
    assert row["phases"] == [
        {"name": "drain", "begin": int(NOW * 1e6), "seconds": 2.0, "bytes": 40 << 30,
         "stopped": False}
    ]  # fmt: skip


def test_nothing_is_overwritten_and_no_link_is_followed(tmp_path: Path) -> None:
    there, link = tmp_path / "there.csv", tmp_path / "link.csv"
    there.write_text("mine")
    link.symlink_to(tmp_path / "elsewhere.csv")
    for path in (there, link):
        with pytest.raises(FileExistsError):
            export.write(str(path), [ROW])
    assert there.read_text() == "mine" and not (tmp_path / "elsewhere.csv").exists()


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = export.write(str(tmp_path / "x.csv"), [])
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_half_of_a_history_is_not_left_behind(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        export.write(str(tmp_path / "x.json"), [ROW, {"id": object()}])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x.json", "x.csv"])
def test_a_full_disk_leaves_nothing_and_is_told(name: str, tmp_path: Path) -> None:
    """What is buffered is written at the end only: that may fail, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            export.write(str(tmp_path / name), [ROW] * 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_with_a_name_is_said_before(tmp_path: Path) -> None:
    (tmp_path / "old.csv").touch()
    assert "must end with .csv or .json" in export.trouble(str(tmp_path / "x.txt"))
    assert "there is no folder" in export.trouble(str(tmp_path / "none" / "x.csv"))
    assert "is there already" in export.trouble(str(tmp_path / "old.csv"))
    assert export.trouble(str(tmp_path / "new.json")) == ""
