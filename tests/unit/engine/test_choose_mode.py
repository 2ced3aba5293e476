"""Which mode ``auto`` chooses, by what earlier checkpoints of the process came to."""

import pytest

from phosd.engine.job.checkpoint_history import CheckpointHistory
from phosd.engine.operations.checkpoint.choose_mode import choose
from phosd.errors import Unsupported


class Able:
    """A group that can do what its fields leave open."""

    def __init__(self, not_parked: str = "", not_by_driver: str = "") -> None:
        why_not = Unsupported(not_parked, reason="multicast") if not_parked else None
        self.why_not_parked = lambda: why_not
        self.why_not_by_driver = lambda: not_by_driver
        self.makes_memory = False


def done(mode: str, lost: float = 1.0) -> CheckpointHistory.Entry:
    return CheckpointHistory.Entry(mode, guessed_wrong=False, starved=False, lost=lost)


WRONG = CheckpointHistory.Entry("recopy", guessed_wrong=True, starved=False, lost=3.0)
STARVED = CheckpointHistory.Entry("auto", guessed_wrong=False, starved=True, lost=1.0)


def chosen(*past: CheckpointHistory.Entry) -> str:
    choice = choose(Able(), "auto", past)  # type: ignore[arg-type]
    assert choice.why
    return choice.mode


@pytest.mark.parametrize(
    ("past", "mode"),
    [
        ((), "concurrent"),
        ((WRONG,), "concurrent"),  # its suspects are known now
        ((WRONG, WRONG), "recopy"),
        ((WRONG, done("concurrent"), WRONG), "concurrent"),
        ((done("recopy"), WRONG, done("recopy"), WRONG), "recopy"),  # nothing new was tried
        ((done("concurrent"), WRONG, WRONG), "concurrent"),
        ((STARVED,), "concurrent"),
        ((STARVED, STARVED), "recopy"),
        ((done("concurrent", 2.0),) * 2 + (done("recopy", 1.0),), "concurrent"),  # seen once
        ((done("concurrent", 2.0),) * 2 + (done("recopy", 1.0),) * 2, "recopy"),
        ((done("concurrent", 2.0),) * 2 + (done("stop", 1.0),) * 2, "stop"),
        ((done("concurrent", 2.0),) * 2 + (done("recopy", 1.9),) * 2, "concurrent"),
        ((done("concurrent", 2.0),) * 2 + (done("driver", 1.0),) * 2, "concurrent"),
        ((done("recopy", 1.0),) * 5, "concurrent"),  # nothing to compare with
    ],
)
def test_what_experience_teaches(past: tuple[CheckpointHistory.Entry, ...], mode: str) -> None:
    assert chosen(*past) == mode


def test_what_cannot_be_parked_is_for_the_driver_whatever_was_seen() -> None:
    group = Able("no hook")
    choice = choose(group, "auto", (WRONG, WRONG))  # type: ignore[arg-type]
    assert (choice.mode, choice.why) == ("driver", "no hook")
    with pytest.raises(Unsupported, match="no hook") as caught:
        choose(group, "concurrent")  # type: ignore[arg-type]
    assert caught.value.reason == "multicast", "as of what stands in the way of parking"
    with pytest.raises(Unsupported, match="shares"):
        choose(Able("no hook", "shares"), "auto")  # type: ignore[arg-type]


def test_who_names_a_mode_gets_it() -> None:
    for mode in ("concurrent", "recopy", "stop", "driver"):
        assert choose(Able(), mode, (WRONG, WRONG)).mode == mode  # type: ignore[arg-type]
