"""Dispatch keys one after another, and only to what the user saw when pressing them.

Textual queues keys by widget, so a key typed right after another could reach a screen before the
first key's action has replaced it. Here each key waits until the one before has been handled.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from textual.app import App
from textual.events import Key
from textual.message_pump import MessagePump

_TIMEOUT = 1.0
"""Seconds after which the next key is dispatched in any case: a widget that is being removed does
not answer.
"""


@runtime_checkable
class Guarded(Protocol):
    """A screen that does not take every key."""

    def takes(self, key: Key) -> bool:
        """Whether the key may act here. ``key.time`` is when it was pressed, on the clock of
        `time.monotonic`.
        """


class Keys:
    """The queue of pressed keys; ``handle`` is Textual's own handler of one."""

    def __init__(self, app: App[Any], handle: Callable[[Key], Awaitable[None]]) -> None:
        self._app = app
        self._handle = handle
        self._typed: asyncio.Queue[Key] = asyncio.Queue()

    def put(self, key: Key) -> None:
        """Queue a pressed key."""
        self._typed.put_nowait(key)

    async def all_through(self) -> None:
        """Wait until all pressed keys have been handled."""
        await self._typed.join()

    async def work(self) -> None:
        """Handle keys for ever."""
        while True:
            key = await self._typed.get()
            try:
                await self._do(key)
            finally:
                self._typed.task_done()

    async def _do(self, key: Key) -> None:
        screen = self._app.screen
        if not isinstance(screen, Guarded) or screen.takes(key):
            with suppress(TimeoutError):
                async with asyncio.timeout(_TIMEOUT):
                    await self._through(key)

    async def _through(self, key: Key) -> None:
        """Dispatch a key, and wait until all widgets that it reaches have handled it: the focused
        one, its ancestors in order, and likewise on a screen that the key may have opened.
        """
        before = self._place()
        self._app.call_later(self._handle, key)
        await self._passed(before)
        while (place := self._place()) != before:
            before = place
            await self._passed(place)

    def _place(self) -> list[MessagePump]:
        """Return the message pumps that a key passes: the application, then from the focus
        outwards.
        """
        inner = self._app.focused or self._app.screen
        return [self._app, *inner.ancestors_with_self]

    async def _passed(self, pumps: list[MessagePump]) -> None:
        for pump in pumps:
            done = asyncio.Event()
            if pump.call_later(done.set):
                await done.wait()
