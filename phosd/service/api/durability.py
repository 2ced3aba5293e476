"""Write images from memory to the disk in the background."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from phosd.engine.job.progress import Progress
from phosd.errors import NoSuchImage, PhosError
from phosd.service.history.events import Event, Severity
from phosd.service.history.history import History
from phosd.service.jobs.engine import Images

_LOOK_SECONDS = 1.0
_AFTER_TROUBLE_SECONDS = 30.0
_CLOSING_SECONDS = 180.0
"""Less than phosd asks systemd for when it stops, which is for bringing programs back, too."""
_log = logging.getLogger(__name__)


class Durability:
    """The writing of one image after the other, oldest first. Use it on the event loop only.

    ``written`` is awaited after each, ``changed`` called when :attr:`trouble` has changed.
    """

    def __init__(
        self,
        engine: Images,
        history: History,
        written: Callable[[], Awaitable[None]],
        changed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._history = history
        self._written = written
        self._changed = changed
        self._progress = Progress()
        self.trouble = ""
        """Why images stay in memory; empty if they do not."""

    async def go_on(self) -> None:
        """Write images whenever there are some."""
        while True:
            self._tell(await self._write_all())
            await asyncio.sleep(_AFTER_TROUBLE_SECONDS if self.trouble else _LOOK_SECONDS)

    async def close(self) -> None:
        """Write what is left, as the machine may be about to end, for :data:`_CLOSING_SECONDS` at
        most. What is not written then stays in memory, for the next phosd.
        """
        limit = asyncio.get_running_loop().call_later(_CLOSING_SECONDS, self._progress.cancel)
        try:
            if why := await self._write_all():
                _log.warning("%s", why)
        finally:
            limit.cancel()
            self._progress.cancel()

    async def _write_all(self) -> str:
        """Write what is in memory only; return why an image is left there, or an empty string."""
        left = ""
        try:
            for image in await asyncio.to_thread(self._engine.in_memory):
                why = await self._write(image)
                left = left or why
        except Exception as error:  # whatever it was, the next round may succeed
            _log.exception("writing images from memory failed")
            left = left or f"images are in memory only: {error!r}"
        return left

    async def _write(self, image: str) -> str:
        """Write an image; return why that failed, or an empty string."""
        try:
            await asyncio.to_thread(self._engine.write_to_disk, image, self._progress)
        except NoSuchImage:  # deleted meanwhile
            return ""
        except (PhosError, OSError) as error:
            return f"image {image} is in memory only: {error}"
        await self._written()
        return ""

    def _tell(self, trouble: str) -> None:
        if trouble == self.trouble:
            return
        self.trouble = trouble
        if trouble:
            _log.warning("%s", trouble)
            self._history.event(Event("image-in-memory", "images", trouble, Severity.WARNING))
        self._changed()
