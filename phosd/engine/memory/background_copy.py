"""What all ways of saving beside a running program have in common."""

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

from phosd.engine.job.progress import Progress
from phosd.engine.mover.client.mover import Mover
from phosd.errors import OutOfMemory

_LEFT_FREE = 1 << 30
"""Bytes of device memory that are left to the program and its neighbours, at least."""
_POLL_SECONDS = 0.02

_T = TypeVar("_T")


def spare_memory(mover: Mover) -> int:
    """Bytes of a GPU's free memory that a job may take for as long as the copying takes."""
    free, _ = mover.free_memory()
    return max(0, min(free - _LEFT_FREE, free * 3 // 4))


def follow(
    parts: Sequence["Future[_T]"],
    account: Progress,
    progress: Progress,
    look: Callable[[], object] = lambda: None,
) -> list[_T]:
    """Wait until all parts are done, passing on how far ``account`` is, and whether they shall
    stop. ``look`` is called now and then.
    """
    reported = 0
    while True:
        over = all(part.done() for part in parts)
        done = account.phases[-1].bytes_done
        progress.advance(done - reported)
        reported = done
        if over:
            return [part.result() for part in parts]
        progress.check()
        look()
        futures.wait(parts, _POLL_SECONDS)


def starved() -> OutOfMemory:
    """The error when a program needs what its checkpoint holds."""
    return OutOfMemory(
        "the program needed the device memory that the checkpoint still held",
        hint="it goes on; try again, or use mode=recopy or mode=stop",
    )
