"""A thread that waits for the device at each step, for as long as there is a file ``hold``.

The word after the number of steps says how: ``stream``, ``context``, ``event`` or ``copy``. With a
number after that, each kernel takes so many seconds.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64
from pathlib import Path

from cuda.bindings import driver
from gpu import Device, Report, State, allocate, ok, read

HOLD = Path("hold")


class Flag:
    """A word that a kernel waits for, and the thread that raises it after ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.address = int(ok(driver.cuMemHostAlloc(4, driver.CU_MEMHOSTALLOC_PORTABLE)))
        self._word = ctypes.c_uint32.from_address(self.address)
        self._word.value = self.wanted = 0
        threading.Thread(target=self._raise, daemon=True).start()

    def _raise(self) -> None:
        said = 0
        while True:
            wanted = self.wanted
            if self._seconds and self._word.value != wanted:
                time.sleep(self._seconds)
            if not HOLD.exists():
                self._word.value = wanted
            elif said != wanted and self._word.value != wanted:
                os.write(1, b"held\n")
                said = wanted
            time.sleep(0.002)


def main() -> None:
    way = sys.argv[2] if len(sys.argv) > 2 else "stream"
    report = Report()
    device = Device()
    state = State(device, cold_block=64 << 10)
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    flag, ignored = Flag(seconds), allocate(16)
    event = ok(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_BLOCKING_SYNC))
    waits: dict[str, Callable[[], object]] = {
        "stream": lambda: ok(driver.cuStreamSynchronize(0)),
        "context": lambda: ok(driver.cuCtxSynchronize()),
        "event": lambda: ok(driver.cuEventSynchronize(event)),
        "copy": lambda: read(ignored, 8),
    }
    for step in report.steps():
        device.launch("wait_for", u64(flag.address), u32(step + 1), u64(ignored))
        ok(driver.cuEventRecord(event, 0))
        flag.wanted = step + 1
        waits[way]()
        report.tell(step, state.step(step, report.seed))


if __name__ == "__main__":
    main()
