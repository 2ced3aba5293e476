"""Once, a kernel waits for another one that the program launches half a second later."""

import time
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64

from cuda.bindings import driver
from gpu import Device, Report, State, allocate, ok

LATE = 10
"""The step before which it happens."""


def main() -> None:
    report = Report()
    device = Device()
    state = State(device, cold_block=64 << 10)
    flag, total = allocate(16), allocate(16)
    waiting, raising = (
        ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)) for _ in range(2)
    )
    for step in report.steps():
        if step == LATE:
            device.launch("wait_for", u64(flag), u32(1), u64(total), stream=waiting)
            print("waiting", flush=True)
            time.sleep(0.5)
            device.launch("raise", u64(flag), u32(1), stream=raising)
        report.tell(step, state.step(step, report.seed))


if __name__ == "__main__":
    main()
