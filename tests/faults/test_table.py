"""What the tests of this folder have found, in one table. It is the last of them."""

from pathlib import Path

import pytest

from phosd.engine.faults import Kind, Point
from tests.faults.case import table

REPORT = Path(__file__).parents[2] / "build" / "fault-matrix.txt"


def test_every_point_and_kind_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """The table, for who reads the log; and nothing is missing in it."""
    rows = [["point", *Kind]]
    rows += [[point, *(table.get((point, kind), "not tried") for kind in Kind)] for point in Point]
    text = "".join(
        f"{name:<22}{''.join(f'{cell:<12}' for cell in cells)}\n" for name, *cells in rows
    )
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(text)
    with capsys.disabled():
        print(f"\nHow jobs ended at each fault; all was well afterwards.\n{text}")
    assert {*table} == {(point, kind) for point in Point for kind in Kind}
