"""What a run leaves out, the runs of other commits play."""

from pathlib import Path

import pytest

from tests.support import rotation

CASES = [f"case {number}" for number in range(40)]


@pytest.fixture(autouse=True)
def a_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rotation, "EVERYTHING", False)
    monkeypatch.setattr(rotation, "REGRESSIONS", tmp_path / "regressions.txt")
    (tmp_path / "regressions.txt").write_text("some: case 7\nother: case 8\nseeds: 99\n")


def test_commits_in_a_row_play_every_case(monkeypatch: pytest.MonkeyPatch) -> None:
    played = []
    for seed in range(100, 104):
        monkeypatch.setattr(rotation, "SEED", seed)
        part = rotation.part("some", CASES, 4)
        assert 0 < len(part) < len(CASES) / 2
        played += part
    assert {*played} == {*CASES}
    assert len(played) == len(CASES) + 3  # what failed once is played by each


def test_a_run_of_everything_plays_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "EVERYTHING", True)
    assert rotation.part("some", CASES, 4) == CASES
    assert len(rotation.seeds("seeds", 2, whole=10)) == 11


def test_each_commit_has_other_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed in range(20):
        monkeypatch.setattr(rotation, "SEED", seed)
        failed, *fresh = rotation.seeds("seeds", 2, whole=10)
        assert (failed, len(fresh)) == (99, 2)
        found += fresh
    assert len({*found}) == len(found)


def test_what_failed_once_names_what_there_is() -> None:
    lines = (rotation.TESTS / "regressions.txt").read_text().splitlines()
    assert all(": " in line for line in lines)


def test_the_longer_a_test_takes_the_more_seldom_it_is_played() -> None:
    assert [rotation.period(seconds) for seconds in (0, 0.5, 1.4, 2, 4.5, 9, 70)] == [
        1,
        1,
        1,
        2,
        6,
        12,
        16,
    ]
