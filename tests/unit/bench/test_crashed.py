"""What a program has printed across its crashes, beside an undisturbed run."""

import pytest

from bench.crashed import compare
from bench.stage import Failed, Step

EXPECTED = [Step(number, f"0x1.{number}p+0") for number in range(5)]


def test_steps_may_come_twice() -> None:
    assert compare([*EXPECTED[:3], *EXPECTED[1:4]], EXPECTED) == 2


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([*EXPECTED[:2], *EXPECTED[3:]], "has not printed step 2"),
        ([*EXPECTED, Step(1, "0x0p+0")], "where the undisturbed run printed 0x1.1p"),
        ([*EXPECTED, Step(7, "0x0p+0")], "printed None"),
    ],
)
def test_what_is_missing_or_differs_is_named(found: list[Step], said: str) -> None:
    with pytest.raises(Failed, match=said):
        compare(found, EXPECTED)
