"""The long plans name what there is, and go on where they were interrupted."""

import json
from pathlib import Path

import pytest

from tests.support import rounds
from tests.support.rounds import Round, play


def test_the_modules_that_depend_on_timing_are_there() -> None:
    modules = rounds.TIMING_MODULES.read_text().split()
    assert len({*modules}) == 20
    assert all((rounds.ROOT / module).exists() for module in modules)


@pytest.mark.parametrize("plan", rounds.PLANS)
def test_no_two_rounds_of_a_plan_have_one_name(plan: str) -> None:
    names = [each.name for each in rounds.PLANS[plan]()]
    assert len(names) == len({*names}) > 30


def test_what_was_played_is_not_played_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "commit", lambda: "this")
    record = tmp_path / "plan.jsonl"
    count = ["sh", "-c", f"echo >>{tmp_path}/played; exit 1"]
    plan = [Round("good", [["true"]]), Round("bad", [count])]
    assert not play(iter(plan), record, end=float("inf"))
    assert not play(iter(plan), record, end=float("inf")), "what failed stays failed"
    assert (tmp_path / "played").read_text() == "\n"
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(row["round"], row["passed"]) for row in rows] == [("good", True), ("bad", False)]
    monkeypatch.setattr(rounds, "commit", lambda: "another")
    assert play(iter(plan[:1]), record, end=float("inf"))


def test_nothing_begins_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "commit", lambda: "this")
    assert play(iter([Round("late", [["false"]])]), tmp_path / "plan.jsonl", end=0.0)
    assert not (tmp_path / "plan.jsonl").exists()
