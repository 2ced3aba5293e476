"""Keys, one after another, and only for what was in sight.

Textual queues keys by widget, so that one typed right behind another could reach a screen before
the other has opened it. Here the next key waits until the one before is through.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

from textual.app import App
from textual.events import Key
from textual.message_pump import MessagePump

_PATIENCE = 1.0
"""Seconds after which the next key goes on in any case: a widget that goes away does not answer."""


@runtime_checkable
class Guarded(Protocol):
    """A screen that does not take every key."""

    def takes(self, key: Key) -> bool:
        """Whether the key may do something here. ``key.time`` is when it was pressed, on the clock
        of `time.monotonic`.
        """


class Keys:
    """The keys of an application, of which ``handle`` is Textual's way to do one."""

    def __init__(self, app: App[Any], handle: Callable[[Key], Awaitable[None]]) -> None:
        self._app = app
        self._handle = handle
        self._typed: asyncio.Queue[Key] = asyncio.Queue()

    def put(self, key: Key) -> None:
        """A key was pressed."""
        self._typed.put_nowait(key)

    async def all_through(self) -> None:
        """Wait until all that were pressed have done what they do."""
        await self._typed.join()

    async def work(self) -> None:
        """Handle them, for ever."""
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
                async with asyncio.timeout(_PATIENCE):
                    await self._through(key)

    async def _through(self, key: Key) -> None:
        """Hand it over, and wait until everybody whom it reaches has done with it: who has the
        focus, those around it in their order, and the same on the screen that it may have opened.
        """
        before = self._place()
        self._app.call_later(self._handle, key)
        await self._passed(before)
        while (place := self._place()) != before:
            before = place
            await self._passed(place)

    def _place(self) -> list[MessagePump]:
        """Through whose hands a key goes: the application, and back to it from the inside."""
        inner = self._app.focused or self._app.screen
        return [self._app, *inner.ancestors_with_self]

    async def _passed(self, pumps: list[MessagePump]) -> None:
        for pump in pumps:
            done = asyncio.Event()
            if pump.call_later(done.set):
                await done.wait()
