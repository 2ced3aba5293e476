"""A callback on a stream needs a lock that another thread holds across calls into the driver."""

import ctypes
import os
import threading

from cuda.bindings import driver
from gpu import Device, Report, State, allocate, ok, read

lock = threading.Lock()
called = 0


def count(_: int) -> None:
    global called
    with lock:
        called += 1


callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(count)


def compute_locked(device: Device) -> None:
    """Work that the process does not survive when it gives a wrong value."""
    device.make_current()
    memory = allocate(4096)
    number = 0
    while True:
        with lock:
            number += 1
            ok(driver.cuMemsetD32(memory, number, 1024))
            if read(memory + 4092, 4) != number.to_bytes(4, "little"):
                os.write(2, b"a wrong value under the lock\n")
                os._exit(1)
        os.sched_yield()  # a lock is not fair


def main() -> None:
    report = Report()
    device = Device()
    stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    state = State(device, cold_block=64 << 10)
    function = driver.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value)
    threading.Thread(target=compute_locked, args=(device,), daemon=True).start()
    for step in report.steps():
        ok(driver.cuLaunchHostFunc(stream, function, 0))
        report.tell(step, state.step(step, report.seed, stream) + called.to_bytes(8, "little"))


if __name__ == "__main__":
    main()
