"""Drive the application from a test."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from textual.app import App
from textual.pilot import Pilot

from phosd.tui.app import PhosApp
from phosd.tui.fleet import FleetApp
from phosd.tui.node import Node
from tests.support.harness import PATIENCE
from tests.support.tui.snapshots import text

_T = TypeVar("_T")
SMALL, LARGE = (80, 24), (160, 48)


def run(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run the body of a test on an event loop."""
    return asyncio.run(work())


async def through(pilot: Pilot[None]) -> None:
    """Wait until all keys have been handled, or have ended the application."""
    assert isinstance(pilot.app, PhosApp)
    await pilot.pause()
    async with asyncio.timeout(PATIENCE):
        await pilot.app.keys.all_through()
    await pilot.pause()


class Hands(Pilot[None]):
    """A pilot that presses each key only when the one before has been handled, as a user would."""

    async def press(self, *keys: str) -> None:
        for key in keys:
            await super().press(key)
            await through(self)


class _Lasting(App[None]):
    """Its toasts stay for as long as a test may take to look, on a busy machine."""

    def notify(self, message: str, **options: Any) -> None:
        super().notify(message, **options | {"timeout": PATIENCE})


class _OneNode(_Lasting, PhosApp):
    pass


class _Fleet(_Lasting, FleetApp):
    pass


@asynccontextmanager
async def opened(
    shown: Node | Sequence[Node], size: tuple[int, int] = SMALL, **options: Any
) -> AsyncIterator[Pilot[None]]:
    """Run phos-tui with a node, or with several, on a terminal of this size."""
    app: PhosApp = (
        _OneNode(shown, **options) if isinstance(shown, Node) else _Fleet(shown, **options)
    )
    app.animation_level = "none"
    async with app.run_test(size=size, notifications=True) as pilot:
        await pilot.pause()
        yield Hands(app)


async def until(pilot: Pilot[None], condition: Callable[[], object], what: str) -> None:
    """Wait for a condition; fail the test, naming ``what``, on a timeout."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE
    while not condition():
        if loop.time() > deadline:
            raise AssertionError(f"waited {PATIENCE:.0f} s in vain for {what}:\n{text(pilot)}")
        await pilot.pause(0.02)


async def until_shown(pilot: Pilot[None], *words: str) -> None:
    """Wait until all these words are on the screen."""
    await until(pilot, lambda: all(word in text(pilot) for word in words), f"{words} to be shown")


async def until_told(pilot: Pilot[None], *words: str) -> None:
    """Wait for a toast with all these words."""

    def told() -> bool:
        toasts = [f"{toast.title} {toast.message}" for toast in pilot.app._notifications]
        return any(all(word in toast for word in words) for toast in toasts)

    await until(pilot, told, f"a toast with {words}")
