"""Make, change and end pools, with what is asked for first."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from phosd.client.records import Image, Pool
from phosd.tui.screens.base import NodeScreen
from phosd.tui.text import plain
from phosd.tui.widgets.dialogs import Field, Form, Question

_MOST = {"hollow": 64, "ready": 64, "max": 1000}
"""Bounds of phosd."""


def make(screen: NodeScreen, image: Image) -> None:
    """Make a pool of an image."""

    def given(answers: dict[str, str] | None) -> None:
        if answers is not None:
            screen.ask(f"Pool {answers['name']}", _make(screen, image, answers))

    name = Field("name", "What it is called", image.name, "chat", _name_trouble)
    form = Form(f"Pool of image {plain(image.id)}", [name, *_sizes(1, 0, 8)], "Make it",
                partial(_image_gone, screen, image))  # fmt: skip
    screen.app.push_screen(form, given)


def scale(screen: NodeScreen, pool: Pool) -> None:
    """Change how many programs of a pool there are."""

    def given(answers: dict[str, str] | None) -> None:
        if answers is not None:
            screen.ask(f"Pool {pool.name}", _scale(screen, pool, answers))

    fields = _sizes(pool.hollow, pool.ready, pool.max)
    form = Form(f"Size of pool {plain(pool.name)}", fields, "Change", _gone(screen, [pool]))
    screen.app.push_screen(form, given)


def remove(screen: NodeScreen, pools: Sequence[Pool]) -> None:
    """End pools after a confirmation."""

    def answered(yes: bool | None) -> None:
        known = screen.node.of(Pool)
        for pool in pools if yes else ():
            if pool.path in known:
                screen.ask(f"End pool {pool.name}", _remove(screen, pool))

    kind = "pool" if len(pools) == 1 else "pools"
    question = (
        f"End {kind} {', '.join(plain(pool.name) for pool in pools)}?\n\nPrograms that wait are "
        "ended. Those that were started run on."
    )
    screen.app.push_screen(Question(question, "End", _gone(screen, pools)), answered)


def _sizes(hollow: int, ready: int, most: int) -> list[Field]:
    return [
        Field("hollow", "How many wait hollow", str(hollow), "1", partial(_trouble, "hollow")),
        Field("ready", "How many more wait ready", str(ready), "0", partial(_trouble, "ready")),
        Field("max", "How many there may be in all", str(most), "8", partial(_trouble, "max")),
    ]


def _numbers(answers: Mapping[str, str]) -> dict[str, int]:
    return {name: int(answers[name]) for name in _MOST}


async def _make(screen: NodeScreen, image: Image, answers: Mapping[str, str]) -> str:
    await screen.node.call("CreatePool", answers["name"], image.id, **_numbers(answers))
    return "it is being filled; Pools (7) shows it"


async def _scale(screen: NodeScreen, pool: Pool, answers: Mapping[str, str]) -> str:
    await screen.node.call("ScalePool", pool.name, **_numbers(answers))
    return "it has its new size"


async def _remove(screen: NodeScreen, pool: Pool) -> str:
    await screen.node.call("RemovePool", pool.name)
    return "it is no pool any more"


def _gone(screen: NodeScreen, pools: Sequence[Pool]) -> Callable[[], str]:
    def why() -> str:
        known = screen.node.of(Pool)
        return "" if any(pool.path in known for pool in pools) else "It is not there any more."

    return why


def _image_gone(screen: NodeScreen, image: Image) -> str:
    return "" if image.path in screen.node.of(Image) else "The image is not there any more."


def _name_trouble(text: str) -> str:
    return "" if text else "a pool needs a name"


def _trouble(name: str, text: str) -> str:
    if text.isdecimal() and int(text) <= _MOST[name]:
        return ""
    return f"{text!r} is no number of programs (up to {_MOST[name]})"
