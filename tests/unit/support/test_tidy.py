"""clang-tidy looks at what the last commit has changed, and at a part of the rest."""

import pytest

from tests.support import rotation, tidy

KNOWN = [f"phosd/hook/{number}.cpp" for number in range(64)]


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "ls-files": [*KNOWN, "phosd/hook/tests/x_test.cpp"],
        "diff": [KNOWN[7], "phosd/hook/tests/x_test.cpp", "phosd/hook/gone.cpp"],
    }
    monkeypatch.setattr(tidy, "git", lambda *words: answers[words[0]])
    monkeypatch.setattr(tidy, "EVERYTHING", False)
    monkeypatch.setattr(rotation, "EVERYTHING", False)


def test_each_source_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    for seed in range(tidy.OF):
        monkeypatch.setattr(rotation, "SEED", seed)
        found = tidy.sources()
        assert KNOWN[7] in found and len(found) < len(KNOWN) / 2
        seen |= {*found}
    assert seen == {*KNOWN}


def test_everything_is_looked_at_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tidy, "EVERYTHING", True)
    assert tidy.sources() == KNOWN


def test_what_it_finds_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["tidy", "2"])
    monkeypatch.setattr(tidy, "_found", lambda source: "")
    tidy.main()
    monkeypatch.setattr(tidy, "_found", lambda source: "a bug" if source == KNOWN[7] else "")
    with pytest.raises(SystemExit, match="a bug"):
        tidy.main()
    assert KNOWN[7] in capsys.readouterr().out
