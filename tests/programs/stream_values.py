"""A stream waits for a value that another thread writes, on a stream of its own, when it is told
that somebody waits.
"""

import queue
import threading

from cuda.bindings import driver
from gpu import Device, Report, State, allocate, ok

GEQ = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)


def write_values(device: Device, flag: int, wanted: "queue.SimpleQueue[int]") -> None:
    device.make_current()
    stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    while True:
        ok(driver.cuStreamWriteValue32(stream, flag, wanted.get(), 0))


def main() -> None:
    report = Report()
    device = Device()
    stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    state = State(device, cold_block=64 << 10)
    flag = allocate(16)
    wanted: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=write_values, args=(device, flag, wanted), daemon=True).start()
    for step in report.steps():
        ok(driver.cuStreamWaitValue32(stream, flag, step + 1, GEQ))
        wanted.put(step + 1)
        report.tell(step, state.step(step, report.seed, stream))


if __name__ == "__main__":
    main()
