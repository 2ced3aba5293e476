"""Provide threads, cancellation and 2D copies for copies out and in."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from phosd.engine.image.manifest import CHUNK
from phosd.engine.image.packs import RECORD
from phosd.engine.mover.worker.gpu import Gpu
from phosd.engine.mover.worker.pinned_packs import PinnedPacks
from phosd.engine.mover.worker.ring import Ring
from phosd.engine.system.cuda import call, driver
from phosd.errors import Cancelled

Report = Callable[[int], None]
"""Called with the number of bytes done since the last call, on any thread."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Transfer:
    """The GPU, ring and pinned packs that move the bytes of requests.

    ``cancelled`` returns whether the engine has cancelled the running request; ``report`` is called
    with the bytes done.
    """

    gpu: Gpu
    ring: Ring
    pinned_packs: PinnedPacks
    cancelled: Callable[[], bool]
    report: Report


class WorkerPool:
    """The threads of one request; the first failure stops the rest."""

    def __init__(self, transfer: Transfer, size: int) -> None:
        self._pool = ThreadPoolExecutor(size, "mover", initializer=transfer.gpu.attach)
        self._cancelled = transfer.cancelled
        self._failed = threading.Event()
        self._futures: list[Future[Any]] = []

    def check(self) -> None:
        """Raise :class:`Cancelled` if the request was cancelled or another thread has failed."""
        if self._cancelled():
            raise Cancelled("the transfer was cancelled")
        if self._failed.is_set():
            raise Cancelled("another part of the transfer failed")

    def submit(self, work: Callable[[_T], None], argument: _T) -> None:
        """Run ``work(argument)`` on one of the threads."""
        future = self._pool.submit(work, argument)
        future.add_done_callback(self._look)
        self._futures.append(future)

    def finish(self) -> None:
        """Wait for all threads, then raise the first error."""
        self._pool.shutdown()
        errors = [e for f in self._futures if (e := f.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, Cancelled)):
            raise error

    def _look(self, future: "Future[Any]") -> None:
        if future.exception() is not None:
            self._failed.set()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, kind: object, error: object, _: object) -> None:
        if error is None or isinstance(error, Cancelled):
            self.finish()  # another thread's error is the cause, and tells more
        else:
            self._failed.set()
            self._pool.shutdown()


def reopen_direct(fd: int, flags: int) -> int:
    """Open the same file for direct I/O; return -1 if the file system has none."""
    try:
        return os.open(f"/proc/self/fd/{fd}", flags | os.O_DIRECT)
    except OSError:
        return -1


def runs(places: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Join chunks that follow one another in memory and in the slot.

    From (memory address, slot offset, length) to (memory address, slot offset, length, rows); the
    rows lie :data:`CHUNK` bytes apart in memory and :data:`RECORD` bytes apart in the slot.
    """
    run: tuple[int, int, int, int] | None = None
    for address, offset, length in places:
        if run is not None:
            start, first, size, rows = run
            if (
                size == length == CHUNK
                and address == start + rows * CHUNK
                and offset == first + rows * RECORD
            ):
                run = (start, first, size, rows + 1)
                continue
            yield run
        run = (address, offset, length, 1)
    if run is not None:
        yield run


def copy_rows(
    destination: tuple[str, int, int],
    source: tuple[str, int, int],
    row: int,
    rows: int,
    stream: Any,
) -> None:
    """Copy ``rows`` rows of ``row`` bytes; a side is (host or device, address, pitch)."""
    b = driver()
    copy = b.CUDA_MEMCPY2D()
    for side, (where, address, pitch) in (("dst", destination), ("src", source)):
        on_host = where == "host"
        kind = "CU_MEMORYTYPE_HOST" if on_host else "CU_MEMORYTYPE_DEVICE"
        setattr(copy, f"{side}MemoryType", getattr(b.CUmemorytype, kind))
        setattr(copy, f"{side}{'Host' if on_host else 'Device'}", address)
        setattr(copy, f"{side}Pitch", pitch)
    copy.WidthInBytes, copy.Height = row, rows
    call("cuMemcpy2DAsync", copy, stream)


def close_all(descriptors: Sequence[int]) -> None:
    """Close descriptors; negative ones are skipped."""
    for fd in descriptors:
        if fd >= 0:
            os.close(fd)
