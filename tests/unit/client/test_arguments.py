"""Arguments that a call cannot take are refused before they are sent, in Python's words."""

import enum
from typing import Any

import pytest

from phosd.bus import CallError, Variant, key_of, path_of
from phosd.client.arguments import spelled
from phosd.interface.manager import MANAGER
from phosd.interface.methods import JOB, PROCESS


class Word(enum.StrEnum):
    DRIVER = "driver"


@pytest.mark.parametrize(
    ("args", "options", "what"),
    [
        (("train",), {}, "pid is a whole number, 0 or more, not 'train'"),
        ((None,), {}, "pid is a whole number, 0 or more, not None"),
        ((True,), {}, "pid is a whole number, 0 or more, not True"),
        ((-1,), {}, "pid is a whole number, 0 or more, not -1"),
        ((1 << 32,), {}, "pid is a whole number, 0 or more, not 4294967296"),
        ((7,), {"mode": 3}, "mode is text, not 3"),
        ((7,), {"every": "10min"}, "every is a number, not '10min'"),
        ((7,), {"keep": 1.5}, "keep is a whole number, 0 or more, not 1.5"),
        ((7,), {"keep": -1}, "keep is a whole number, 0 or more, not -1"),
        ((7,), {"queue": 1}, "queue is True or False, not 1"),
        ((7,), {"mode": "a\0b"}, r"mode is 'a\\x00b', which has a zero byte, or bytes .*"),
        ((7,), {"newer": "\udcff"}, r"newer is '\\udcff', which has a zero byte, or bytes .*"),
        ((7,), {"newer": [1]}, r"newer is True, False, a number or text, not \[1\]"),
    ],
)
def test_a_value_of_another_type_is_refused(
    args: tuple[Any, ...], options: dict[str, Any], what: str
) -> None:
    with pytest.raises(CallError, match=f"^{what}$") as caught:
        spelled(MANAGER, "Checkpoint", *args, **options)
    assert caught.value.name == "org.phos.Error.InvalidOption"


def test_what_fits_is_spelled_for_the_bus() -> None:
    given = {"every": 600, "keep": 3, "mode": Word.DRIVER, "queue": True, "newer": 0.5}
    *head, pid, sent = spelled(MANAGER, "Checkpoint", 7, **given)
    assert head == ["org.phos.Manager1", "Checkpoint", "ua{sv}"]
    assert pid == 7
    assert sent == {
        "every": Variant("x", 600),
        "keep": Variant("x", 3),
        "mode": Variant("s", "driver"),
        "queue": Variant("b", True),
        "newer": Variant("d", 0.5),
    }
    assert spelled(JOB, "Cancel") == ("org.phos.Job1", "Cancel", "a{sv}", {})
    assert spelled(PROCESS, "ReadLog") == ("org.phos.Process1", "ReadLog", "a{sv}", {})


@pytest.mark.parametrize("key", ["train-3", "0a1b2c", "GPU-5f", "a_2db"])
def test_a_key_is_read_again_from_its_path(key: str) -> None:
    assert key_of(path_of("image", key)) == key
