"""Watch which blocks a program frees, so that the engine can release their memory."""

import logging
import threading
from collections.abc import Callable

from phosd.engine.chunk_map.chunk_map import ChunkMap
from phosd.engine.system import procfs
from phosd.errors import PhosError

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
"""Seconds between checks whether the process still lives, which keeps its memory until it ends."""


class FreeWatcher:
    """Read the freed blocks of one process from its chunk map, on a thread, until :meth:`end`.

    ``freed`` is called with the ids of freed blocks, or None if some may have been missed. It
    returns whether their memory is free now; if it is freed later, call :meth:`settle` then.
    ``gone`` is called when the process has ended. The watcher closes the chunk map.
    """

    def __init__(
        self,
        pid: int,
        chunk_map: ChunkMap,
        freed: Callable[[list[int] | None], bool],
        gone: Callable[[], None],
    ) -> None:
        self.chunk_map = chunk_map
        self._pid = pid
        self._freed = freed
        self._gone = gone
        self._over = threading.Event()
        stat = procfs.stat(pid)
        self._start = None if stat is None else stat.start_time
        self._thread = threading.Thread(target=self._run, name=f"watch-{pid}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still watches a living process."""
        return self._thread.is_alive() and not self._over.is_set()

    def settle(self) -> None:
        """Tell the hook that the memory which the process freed is released."""
        self.chunk_map.taken()

    def end(self) -> None:
        """Stop watching. May be called from the callbacks."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self.chunk_map.close()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                posted = self.chunk_map.wait(_LOOK_SECONDS)
                stat = procfs.stat(self._pid)
                if stat is None or stat.dead or stat.start_time != self._start:
                    self._gone()
                    return
                if posted:
                    self._take()
        except PhosError as error:
            _log.warning("what process %d frees is no longer known: %s", self._pid, error)

    def _take(self) -> None:
        freed = self.chunk_map.freed()
        if freed != [] and self._freed(freed):
            self.chunk_map.taken()
