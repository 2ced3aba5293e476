"""Durations, sizes and shares with units."""

import pytest

from phosd.units import age_text, counted, duration, duration_text, human_bytes, share, size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("90", 90), ("0.5", 0.5), ("90s", 90), ("5m", 300), ("5min", 300), ("2h", 7200)],
        *[("1d", 86_400), ("1w", 604_800), ("1.5h", 5400), ("250ms", 0.25), ("7us", 7e-6)],
        *[("1h30min", 5400), ("1min 30s", 90), (" 1min 30s ", 90), ("1h 2m 3s", 3723)],
        *[("", None), ("s", None), ("-5s", None), ("5 min", None), ("1h30", None), ("off", None)],
        *[
            ("1d 2h 3min 4.5s", 93_784.5),
            ("1min and more", None),
            ("infinity", None),
            ("1e3", None),
            ("٢h", None),
            ("5 s", None),
            ("1..5s", None),
        ],
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert duration(text) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *[(0.5, "0.5 s"), (90, "90 s"), (600, "10 min"), (5400, "90 min")],
        *[(172_800, "2 d"), (1e9, "1e+09 s")],
    ],
)
def test_durations_are_told_as_they_are_written(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *[("4096", 4096), ("500M", 500 * 10**6), ("1.5GB", 1_500_000_000), ("16GiB", 16 << 30)],
        *[("16 GiB", 16 << 30), (" 2Ti ", 2 << 40), ("64KiB", 64 << 10), ("7B", 7)],
        *[("", None), ("GiB", None), ("-1", None), ("1g", None), ("1 PiB", None), ("1e9", None)],
    ],
)
def test_sizes(text: str, found: int | None) -> None:
    assert size(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        *[("5%", 0.05), ("2.5 %", 0.025), ("0%", 0.0), ("99%", 0.99)],
        *[("", None), ("%", None), ("5", None), ("-5%", None), ("100%", None), ("5%%", None)],
    ],
)
def test_shares(text: str, found: float | None) -> None:
    assert share(text) == found


def test_things_are_counted_as_people_do() -> None:
    assert [counted(n, "kernel") for n in (0, 1, 2000)] == [
        "0 kernels",
        "1 kernel",
        "2,000 kernels",
    ]
    assert [counted(n, "process", "processes") for n in (1, 2)] == ["1 process", "2 processes"]


def test_bytes_and_ages_have_one_unit() -> None:
    assert [human_bytes(n) for n in (0, 1023, 16 << 20, 3 << 40, 5 << 50)] == [
        *("0 B", "1023 B", "16.0 MiB", "3.0 TiB", "5120.0 TiB")
    ]
    passed = (-3, 59.9, 60, 7200, 200_000)
    assert [age_text(each) for each in passed] == ["0 s", "59 s", "1 min", "2 h", "2 d"]
