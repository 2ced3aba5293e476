"""`make test` fails when it has become too slow, and says by what."""

import json
import sys
from pathlib import Path

import pytest

from tests.support import budget
from tests.support.speed import REFERENCE

LIMITS = '[total]\nwarm = 5\ncold = 8\nlimit = 10\n[steps]\nbuild = 4\n[tests]\n"tests/unit" = 3\n'


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "budget.toml").write_text(LIMITS)
    monkeypatch.setattr(budget, "BUDGET", tmp_path / "budget.toml")
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["budget", str(tmp_path)])
    (tmp_path / "steps").write_text("build\t4\nPython tests\t7\nvirtual environment\t90\n")
    (tmp_path / "times.json").write_text(json.dumps({"tests/unit/a.py": 2, "tests/unit/b.py": 5}))
    (tmp_path / "load").write_text("0.30 0.40 0.90\n")
    (tmp_path / "speed").write_text(f"{REFERENCE / 2}\n")
    return tmp_path


def test_beyond_the_limit_it_fails_and_says_what_has_grown(
    logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="has taken 11 s, which is more than its limit of 10 s"):
        budget.main()
    said = capsys.readouterr().out.splitlines()
    assert said[-2:] == [
        "over its budget: Python tests, by 7 s",
        "over its budget: tests/unit, by 4 s",
    ]


@pytest.mark.parametrize("load", ["1.00 0.20 0.10\n", "0.10 0.20 1.00\n", None])
def test_a_busy_machine_makes_no_change_wrong(
    load: str | None, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (logs / "load").unlink() if load is None else (logs / "load").write_text(load)
    budget.main()
    assert "over its budget: tests/unit, by 4 s" in capsys.readouterr().out


def test_a_slow_machine_has_more_time(logs: Path) -> None:
    (logs / "speed").write_text(f"{REFERENCE * 1.11}\n")
    budget.main()
    (logs / "speed").write_text(f"{REFERENCE * 1.09}\n")
    with pytest.raises(SystemExit, match="more than its limit of 11 s"):
        budget.main()


def test_within_the_limit_it_passes(logs: Path) -> None:
    (logs / "steps").write_text("build\t4\nPython tests\t6\n")
    budget.main()
