"""Find spare device memory for a copy beside a running program, and wait for the copy."""

from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from typing import TypeVar

from phosd.engine.job.progress import Progress
from phosd.engine.mover.client.mover import Mover
from phosd.errors import OutOfMemory

_LEFT_FREE = 1 << 30
"""Bytes of device memory that stay free for the program and its neighbours, at least."""
_POLL_SECONDS = 0.02

_T = TypeVar("_T")


def spare_memory(mover: Mover) -> int:
    """Return the bytes of a GPU's free memory that a job may take while it copies."""
    free, _ = mover.free_memory()
    return max(0, min(free - _LEFT_FREE, free * 3 // 4))


def follow(
    parts: Sequence["Future[_T]"],
    account: Progress,
    progress: Progress,
    look: Callable[[], object] = lambda: None,
) -> list[_T]:
    """Wait until all ``parts`` are done; return their results.

    Reports the bytes of ``account`` to ``progress``, and raises :class:`Cancelled` if the job is
    cancelled. ``look`` is called at every poll.
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
    """Return the error for a program that needs device memory which its checkpoint holds."""
    return OutOfMemory(
        "the program needed the device memory that the checkpoint still held",
        hint="it goes on; try again, or use mode=recopy or mode=stop",
    )
