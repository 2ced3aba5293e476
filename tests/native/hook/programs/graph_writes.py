"""Computes in graphs only, of every kind that the software GPU has, one after the other."""

import sys
from ctypes import c_uint64 as u64
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "programs"))

from cuda.bindings import driver
from gpu import Device, Report, allocate, ok, read

SIZE = 64 << 10
MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def main() -> None:
    report = Report()
    device = Device()
    stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    memory, copied, total = allocate(SIZE), allocate(SIZE), allocate(16)

    def captured(step: int) -> Any:
        ok(driver.cuStreamBeginCapture(stream, MODE))
        device.advance(memory, SIZE, report.seed + step, stream)
        ok(driver.cuMemsetD8Async(copied, step, SIZE // 2, stream))
        ok(driver.cuMemcpyDtoDAsync(copied + SIZE // 2, memory, SIZE // 2, stream))
        device.fold(copied, SIZE, total, stream)
        device.launch("stir", u64(total), stream=stream)
        return ok(driver.cuStreamEndCapture(stream))

    first = captured(1)
    executable = ok(driver.cuGraphInstantiate(first, 0))
    outer = ok(driver.cuGraphCreate(0))
    ok(driver.cuGraphAddChildGraphNode(outer, [], 0, first))
    nested = ok(driver.cuGraphInstantiate(outer, 0))
    for step in report.steps():
        changed = captured(step)
        ok(driver.cuGraphExecUpdate(executable, changed))
        ok(driver.cuGraphLaunch(executable, stream))
        ok(driver.cuGraphLaunch(nested, stream))
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuGraphDestroy(changed))
        report.tell(step, read(total, 8))


if __name__ == "__main__":
    main()
