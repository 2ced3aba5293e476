"""A context and no device memory: kernels compute on pinned host memory."""

import ctypes

from cuda.bindings import driver
from gpu import Device, Report, ok

SIZE = 64 << 10


def main() -> None:
    report = Report()
    device = Device()
    mapped = driver.CU_MEMHOSTALLOC_DEVICEMAP
    host = int(ok(driver.cuMemHostAlloc(SIZE, mapped)))
    ctypes.memset(host, 0, SIZE)
    address = int(ok(driver.cuMemHostGetDevicePointer(host, 0)))
    for step in report.steps():
        device.advance(address, SIZE, report.seed + step)
        ok(driver.cuCtxSynchronize())
        report.tell(step, ctypes.string_at(host, SIZE))


if __name__ == "__main__":
    main()
