"""Steps of ``make test`` that are left to other commits."""

from collections.abc import Callable

import pytest

from tests.support import rotation, turn


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "EVERYTHING", False)
    monkeypatch.setattr(rotation, "EVERYTHING", False)


def changed(*names: str) -> Callable[..., list[str]]:
    """Answer as git, of which recent commits have changed these files."""
    return lambda what, *_: ["newer", "older"] if what == "rev-list" else [*names]


def played(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many of 40 commits play a step that one in four is to play."""
    count = 0
    for seed in range(40):
        monkeypatch.setattr(rotation, "SEED", seed)
        count += turn.is_played("a step", 4, ["phosd/hook/*"])
    return count


def test_a_step_has_its_turn_whatever_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "git", changed())
    assert played(monkeypatch) == 10


def test_a_step_is_played_when_what_it_tests_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "git", changed("phosd/hook/hook.cpp"))
    assert played(monkeypatch) == 40


def test_a_step_is_played_when_git_cannot_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "git", lambda *_: [])
    assert played(monkeypatch) == 40


def test_everything_is_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "EVERYTHING", True)
    monkeypatch.setattr(turn, "git", changed())
    assert played(monkeypatch) == 40
