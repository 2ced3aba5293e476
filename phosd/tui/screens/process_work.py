"""Save processes, once and again and again, with options that are asked for first."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import get_args

from phosd.client.records import Process
from phosd.interface.options import CheckpointMode
from phosd.tui.screens.base import NodeScreen
from phosd.tui.screens.process_state import there
from phosd.tui.text import command_line
from phosd.tui.widgets.dialogs import Choice, Field, Form
from phosd.units import duration, duration_text

_NO_JOB = "/"
"""Returned instead of a job's path by a call that ends a schedule."""
_USUAL, _KEPT = "10min", 5
_NEVER = "never"


def checkpoint_with(screen: NodeScreen, chosen: Sequence[Process]) -> None:
    """Save each process once, asking for options first."""
    features = screen.node.manager.features
    cached = []
    if "release-cached" in features:
        ways = [("save it, too", ""), ("release it first", "yes")]
        cached = [Choice("release_cached", "Unused memory of PyTorch", ways)]
    choices = [
        _mode(features),
        Choice("fallback", "After a wrong guess",
               [("go on in a mode that guesses less", "auto"), ("fail", "none")]),
        Choice("parent", "What is saved",
               [("everything", ""), ("what differs from its latest image", "auto")]),
        Choice("tcp", "TCP connections to outside",
               [("refuse to save the program", "refuse"),
                ("close them when it is restored", "close")]),
        *cached,
    ]  # fmt: skip

    def given(answers: dict[str, str] | None) -> None:
        if answers is not None:
            _checkpoint(screen, chosen, _options(answers))

    title = f"Checkpoint of {named(chosen)}"
    form = Form(title, choices, "Checkpoint", partial(gone, screen, chosen))
    screen.app.push_screen(form, given)


def schedule(screen: NodeScreen, chosen: Sequence[Process]) -> None:
    """Save each process again and again from now on, or no longer."""
    features, first = screen.node.manager.features, chosen[0]
    often = duration_text(first.every).replace(" ", "") if first.every else _USUAL
    choices: list[Choice | Field] = [
        Field("every", "How often; `never` ends it", often, _USUAL, _every_trouble),
        Field("keep", "How many of its images are kept", str(first.keep or _KEPT), str(_KEPT),
              _keep_trouble),
        _mode(features),
    ]  # fmt: skip
    if "rehearsals" in features:
        ways = [("none", ""), ("that of each image, in a job of its own", "yes")]
        choices.append(Choice("rehearse", "Restore to rehearse", ways))

    def given(answers: dict[str, str] | None) -> None:
        if answers is None:
            return
        if answers["every"] == _NEVER:
            _checkpoint(screen, chosen, {"every": 0.0})
            return
        numbers = {"every": duration(answers["every"]) or 0.0, "keep": int(answers["keep"])}
        _checkpoint(screen, chosen, _options(answers) | numbers)

    title = f"Schedule of {named(chosen)}"
    screen.app.push_screen(Form(title, choices, "Save so", partial(gone, screen, chosen)), given)


def gone(screen: NodeScreen, processes: Sequence[Process]) -> str:
    """Return why an action is void: all the processes have ended; an empty string otherwise."""
    if there(processes, screen.node):
        return ""
    return "It has ended." if len(processes) == 1 else "All of them have ended."


def named(chosen: Sequence[Process]) -> str:
    """Return how one calls these processes."""
    if len(chosen) == 1:
        return f"{chosen[0].pid} ({command_line(chosen[0].command)})"
    return f"{len(chosen)} processes: {', '.join(str(p.pid) for p in chosen)}"


def _mode(features: frozenset[str]) -> Choice:
    offered = [mode for mode in get_args(CheckpointMode) if f"mode-{mode}" in features]
    return Choice("mode", "Mode", [("auto: phosd chooses", "auto"), *((m, m) for m in offered)])


def _options(answers: Mapping[str, str]) -> dict[str, bool | str | float]:
    """Return what was chosen as options of the call; an empty answer is none."""
    return {name: answer == "yes" or answer for name, answer in answers.items() if answer}


def _every_trouble(text: str) -> str:
    seconds = duration(text)
    if text == _NEVER or (seconds is not None and seconds >= 1):
        return ""
    return f"{text!r} is neither {_NEVER!r} nor a time of at least 1 s, like `90s` or `10min`"


def _keep_trouble(text: str) -> str:
    return "" if text.isdecimal() and int(text) else f"{text!r} is no number of images"


def _checkpoint(
    screen: NodeScreen, chosen: Sequence[Process], options: Mapping[str, bool | str | float]
) -> None:
    for process in there(chosen, screen.node):
        work = _checkpoint_or_end(screen, process.pid, options)
        screen.ask(f"Checkpoint of {process.pid}", work)


async def _checkpoint_or_end(
    screen: NodeScreen, pid: int, options: Mapping[str, bool | str | float]
) -> str:
    told = str(await screen.node.call("Checkpoint", pid, **options))
    return told if told != _NO_JOB else f"{pid} has no periodic checkpoints any more"
