"""Text that comes from programs, and figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from phosd.tui import text


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("train.py", "train.py"),
        ("a\x1b[31mred", r"a\x1b[31mred"),
        ("a\nb\tc\x07", r"a\nb\tc\x07"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        ("zero\u200bwidth", r"zero\u200bwidth"),
        ("\x9b31m", r"\x9b31m"),
        ("[bold]no markup[/]", "[bold]no markup[/]"),
        ("模型", "模型"),
        ("\udcff", r"\udcff"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_as_an_escape(given: str, shown: str) -> None:
    assert text.plain(given) == shown


def test_lines_stay_lines_where_they_are_wanted() -> None:
    assert text.plain("a\nb\x1b", lines=True) == "a\nb\\x1b"


def test_a_command_line_without_end_costs_nothing() -> None:
    assert len(text.command_line(["x" * 10_000_000] * 1000)) <= 4096


@given(st.text(max_size=60), st.integers(1, 40), st.booleans())
def test_a_text_is_fitted_into_exactly_so_many_cells(given: str, width: int, right: bool) -> None:
    assert cell_len(text.fit(text.plain(given), width, right=right)) == width


def test_what_is_cut_off_leaves_an_ellipsis() -> None:
    assert text.fit("checkpoint", 6) == "check…"
    assert text.fit("模型模型", 6) == "模型 …"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.5, "0.50 s"),
        (59.9, "59 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations(value: float, shown: str) -> None:
    assert text.seconds(value) == shown


def test_how_long_ago() -> None:
    assert [text.since(moment, 10_000) for moment in (None, 10_000, 9_000, 2_000)] == [
        "",
        "0 s",
        "16 min",
        "2 h",
    ]
    assert text.since(20_000, 10_000) == "0 s"  # a clock that was set back


def test_bars_and_sparklines() -> None:
    assert text.bar(0.5, 4) == "██··"
    assert text.bar(7.0, 3) == "███"
    assert text.spark([0.0, None, 0.5, 1.0], 6) == "  ▁ ▅█"
    assert text.spark([0.1] * 9, 3) == "▂▂▂"
    assert text.spark([0.1], 0) == ""
