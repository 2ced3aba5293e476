"""Analyse what programs launch, a little at a time, while no job runs."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from phosd.engine.program.process import GpuProcess
from phosd.service.jobs.engine import Kernels

_SECONDS = 5.0
"""Between two looks for something to do."""
_log = logging.getLogger(__name__)


class Analyses:
    """Has the engine analyse kernels on a thread of its own. ``processes`` returns those that there
    are, ``busy`` whether jobs run. Use it on the event loop only.
    """

    def __init__(
        self,
        engine: Kernels,
        processes: Callable[[], Sequence[GpuProcess]],
        busy: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._processes = processes
        self._busy = busy
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="analysis")
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Look for something to do now."""
        self._woken.set()

    async def go_on(self) -> None:
        """Do a little, again and again. What fails is tried again with the next look."""
        loop = asyncio.get_running_loop()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_SECONDS):
                    await self._woken.wait()
            self._woken.clear()
            more = True
            while more and not self._busy():
                found = self._processes()
                try:
                    more = await loop.run_in_executor(
                        self._thread, self._engine.analyse_some, found
                    )
                except Exception:
                    _log.exception("kernels could not be analysed")
                    more = False

    def close(self) -> None:
        """Begin nothing more. The engine ends what is going on when it is closed."""
        self._thread.shutdown(wait=False, cancel_futures=True)
