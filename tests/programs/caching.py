"""Device memory that an allocator keeps cached, as PyTorch's does: the stand-in for ``torch.cuda``
frees it. The second argument says what is different: ``plain`` is a program without torch,
``raises`` has a cache that cannot be emptied, ``waits`` computes beside a main thread that waits in
C, until SIGUSR1.

It prints ``emptied`` when its cache is emptied.
"""

import ctypes
import os
import signal
import sys
import threading
from types import ModuleType

from cuda.bindings import driver
from gpu import Device, Report, State, allocate, ok

CACHED = 8
SIZE = 4 << 20
"""Bytes of a cached block."""


class Cache:
    """Blocks that nobody uses."""

    def __init__(self, variant: str) -> None:
        self._variant = variant
        self._free = [allocate(SIZE) for _ in range(CACHED)]

    def empty(self) -> None:
        """What ``torch.cuda.empty_cache()`` does."""
        if self._variant == "raises":
            raise RuntimeError("the cache \x1b[31m is damaged")
        while self._free:
            ok(driver.cuMemFree(self._free.pop()))
        os.write(1, b"emptied\n")


def pretend_torch(cache: Cache) -> None:
    """Make the program look as if it had imported PyTorch."""
    torch, cuda = ModuleType("torch"), ModuleType("torch.cuda")
    torch.cuda = cuda  # type: ignore[attr-defined]
    cuda.empty_cache = cache.empty  # type: ignore[attr-defined]
    sys.modules.update({"torch": torch, "torch.cuda": cuda})


def compute(device: Device, state: State, report: Report) -> None:
    """All steps."""
    device.make_current()
    for step in report.steps():
        report.tell(step, state.step(step, report.seed))


def main() -> None:
    variant = sys.argv[2] if len(sys.argv) > 2 else ""
    report = Report()
    device = Device()
    state = State(device)
    cache = Cache(variant)
    if variant != "plain":
        pretend_torch(cache)
    if variant == "waits":
        signal.signal(signal.SIGUSR1, lambda *_: None)
        worker = threading.Thread(target=compute, args=(device, state, report))
        worker.start()
        libc = ctypes.CDLL(None)
        while worker.is_alive():
            libc.pause()
    else:
        compute(device, state, report)


if __name__ == "__main__":
    main()
