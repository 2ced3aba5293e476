"""Lend CUDA streams to requests. They are made in advance: a stream takes device memory, of which a
neighbour may leave none when a program is stopped.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from phosd.engine.system.cuda import call, driver


class Streams:
    """``count`` streams of the current context, and more when needed. Safe to use from several
    threads.
    """

    def __init__(self, count: int) -> None:
        self._idle = [_stream() for _ in range(count)]
        self._lock = threading.Lock()

    @contextmanager
    def lent(self, count: int) -> Iterator[list[Any]]:
        """Lend streams for one request; at the end, wait until they are idle."""
        with self._lock:
            ours, self._idle = self._idle[:count], self._idle[count:]
        try:
            while len(ours) < count:
                ours.append(_stream())
            yield ours
        finally:
            for stream in ours:
                call("cuStreamSynchronize", stream)
            with self._lock:
                self._idle += ours


def _stream() -> Any:
    return call("cuStreamCreate", driver().CUstream_flags.CU_STREAM_NON_BLOCKING)
