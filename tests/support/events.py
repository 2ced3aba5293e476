"""Wait for an event of a chunk map, for a bounded time."""

import os
import threading

from phosd.engine.chunk_map.chunk_map import ChunkMap, Event

PATIENCE = 20.0


def next_event(chunk_map: ChunkMap, pid: int) -> Event:
    """The next event of the chunk map or the process; STOPPED if there is none for 20 s."""
    pidfd = os.pidfd_open(pid)
    giving_up = threading.Timer(PATIENCE, chunk_map.stop_watching)
    giving_up.start()
    try:
        return chunk_map.next_event(pidfd)
    finally:
        giving_up.cancel()
        giving_up.join()
        os.close(pidfd)
