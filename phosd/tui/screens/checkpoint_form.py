"""Ask for the options of a checkpoint."""

from collections.abc import Mapping
from typing import get_args

from phosd.interface.options import CheckpointMode
from phosd.tui.widgets.dialogs import Choice

Options = dict[str, bool | str | float]


def choices(features: frozenset[str]) -> list[Choice]:
    """Return the questions about a checkpoint, as far as phosd offers what they are about."""
    offered = [mode for mode in get_args(CheckpointMode) if f"mode-{mode}" in features]
    repeat = [("once", "")]
    if "periodic" in features:
        repeat += [("every minute", "60"), ("every 10 minutes", "600"), ("every hour", "3600"),
                   ("end the schedule", "0")]  # fmt: skip
    cached = []
    if "release-cached" in features:
        ways = [("save it, too", ""), ("release it first", "yes")]
        cached = [Choice("release_cached", "Unused memory of PyTorch", ways)]
    return [
        Choice("mode", "Mode", [("auto: phosd chooses", "auto"), *((m, m) for m in offered)]),
        Choice("fallback", "After a wrong guess",
               [("go on in a mode that guesses less", "auto"), ("fail", "none")]),
        Choice("parent", "What is saved",
               [("everything", ""), ("what differs from its latest image", "auto")]),
        Choice("tcp", "TCP connections to outside",
               [("refuse to save the program", "refuse"),
                ("close them when it is restored", "close")]),
        *cached,
        Choice("every", "How often", repeat),
    ]  # fmt: skip


def options(given: Mapping[str, str]) -> Options:
    """Return the answers as options of the call."""
    found: Options = {name: value for name, value in given.items() if value}
    if given["every"]:
        found["every"] = float(given["every"])
    if given.get("release_cached"):
        found["release_cached"] = True
    return found
