"""Pin an image's packs on another thread, while the program runs.

It takes seconds for tens of GB, and all cores of the host: nothing waits for it that does not have
to, and nothing is pinned while the program is stopped.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from phosd.engine.image.writer import Pack
from phosd.engine.job.progress import Progress
from phosd.engine.job.rollback import Undo
from phosd.engine.memory.exported import if_alive
from phosd.engine.mover.client.mover import Mover

_PART = 4
"""Packs that are pinned at a time, up to 4 GB: a third of a second. Fewer keep fewer threads busy:
with two, pinning took half as long again (H200).
"""
_LOOK_SECONDS = 0.05
_log = logging.getLogger(__name__)


class PackPinning:
    """The pinning of packs by the mover of their GPU, from now until :meth:`end`.

    ``keep``: they stay pinned for the next image.
    """

    def __init__(self, mover: Mover, packs: Sequence[Pack], *, keep: bool = False) -> None:
        self._mover = mover
        self._keep = keep
        self._parts = [packs[at : at + _PART] for at in reversed(range(0, len(packs), _PART))]
        self._pins: list[int] = []
        self._going = threading.Event()
        self._going.set()
        self._at_work = threading.Lock()
        self._over = False
        self._pool = ThreadPoolExecutor(1, "pinning")
        self._pinned = self._pool.submit(self._pin)

    def wait(self, progress: Progress) -> None:
        """Wait until all packs are pinned. Raises :class:`Cancelled`."""
        while not self._pinned.done():
            progress.check()
            futures.wait([self._pinned], _LOOK_SECONDS)
        self._pinned.result()

    def rest(self) -> None:
        """Pin nothing until :meth:`go_on`. Waits for what has begun."""
        self._going.clear()
        with self._at_work:
            pass

    def go_on(self) -> None:
        """Pin the other packs."""
        self._going.set()

    def end(self) -> None:
        """Give back the packs, which keep their bytes."""
        self._over = True
        self._going.set()
        self._pool.shutdown()
        if error := self._pinned.exception():
            _log.warning("packs could not be pinned: %s", error)
        with Undo() as each:
            for number in self._pins:
                unpin = partial(self._mover.unpin, number, keep=self._keep)
                each.add(if_alive, self._mover, unpin)

    def _pin(self) -> None:
        while self._parts:
            self._going.wait()
            if self._over:
                return
            with self._at_work:
                if self._going.is_set():
                    packs = self._parts.pop()
                    self._pins.append(self._mover.pin(pack.fd for pack in packs))
