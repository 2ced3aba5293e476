"""Lists that phosd is asked for again whenever there may be something new."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from textual.css.query import NoMatches
from textual.screen import Screen

_PAUSE = 1.0
"""Seconds between two questions."""


class Reading:
    """Asks once at a time, and not more often than every second. To be made by a screen, on whose
    event loop ``ask`` runs.
    """

    def __init__(self, screen: Screen[None], ask: Callable[[], Awaitable[None]]) -> None:
        self._screen = screen
        self._ask = ask
        self._wanted = False
        self._busy = False

    def want(self) -> None:
        """Ask now; or, if that was just done, as soon as it may be done again."""
        self._wanted = True
        if not self._busy:
            self._busy = True
            self._screen.run_worker(self._go())

    async def _go(self) -> None:
        try:
            while self._wanted:
                self._wanted = False
                with contextlib.suppress(NoMatches):  # of a screen that closes, parts are gone
                    await self._ask()
                await asyncio.sleep(_PAUSE)
        finally:
            self._busy = False
