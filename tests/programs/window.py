"""Keep four steps in flight, and wait for the oldest before the next: the device is never idle."""

import ctypes
import itertools
from ctypes import c_uint64 as u64

from cuda.bindings import driver
from gpu import Device, Report, allocate, ok

AHEAD = 4
SIZE = 16


def main() -> None:
    report = Report()
    device = Device()
    total = allocate(SIZE)
    stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
    events = [ok(driver.cuEventCreate(flags)) for _ in range(AHEAD)]
    answers = [int(ok(driver.cuMemHostAlloc(SIZE, 0))) for _ in range(AHEAD)]
    places = itertools.cycle(zip(events, answers, strict=True))
    for step, (event, answer) in zip(report.steps(), places, strict=False):
        ok(driver.cuEventSynchronize(event))
        said = ctypes.string_at(answer, SIZE) if step >= AHEAD else b""
        device.launch("stir", u64(total), stream=stream)
        ok(driver.cuMemcpyDtoHAsync(answer, total, SIZE, stream))
        ok(driver.cuEventRecord(event, stream))
        report.tell(step, said)


if __name__ == "__main__":
    main()
