"""Read a list from phosd again whenever it may have changed."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from textual.css.query import NoMatches
from textual.screen import Screen

_PAUSE = 1.0
"""Least seconds between two reads."""


class Reading:
    """A rate limit for ``ask``: one call at a time, at most one a second. Make it in a screen, on
    whose event loop ``ask`` runs.
    """

    def __init__(self, screen: Screen[None], ask: Callable[[], Awaitable[None]]) -> None:
        self._screen = screen
        self._ask = ask
        self._wanted = False
        self._busy = False

    def want(self) -> None:
        """Call ``ask`` now, or as soon as the rate limit permits."""
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
