"""Watch which blocks a program frees, so that the engine can release their memory."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from phosd.engine.chunk_map.chunk_map import ChunkMap, Event
from phosd.errors import PhosError

_log = logging.getLogger(__name__)


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
        self._process: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._process = os.pidfd_open(pid)
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
        self.chunk_map.stop_watching()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self.chunk_map.close()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                event = self._next_event()
                if event is Event.ENDED:
                    self._gone()
                    return
                if event is Event.POSTED:
                    self._take()
        except PhosError as error:
            _log.warning("what process %d frees is no longer known: %s", self._pid, error)
        finally:
            if self._process is not None:
                os.close(self._process)

    def _next_event(self) -> Event:
        return Event.ENDED if self._process is None else self.chunk_map.next_event(self._process)

    def _take(self) -> None:
        freed = self.chunk_map.freed()
        if freed != [] and self._freed(freed):
            self.chunk_map.taken()
