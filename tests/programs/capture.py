"""Captures one stream after the other and launches the graphs, while another thread computes."""

import threading
from ctypes import c_uint64 as u64
from typing import Any

from cuda.bindings import driver
from gpu import Device, Report, allocate, ok

SIZE = 64 << 10
MODES = list(driver.CUstreamCaptureMode)
RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def new_stream() -> Any:
    return ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


def compute(device: Device, memory: int, total: int, stream: Any) -> None:
    """Work beside a capture; a thread that did not ask for it may not even wait for a stream."""
    device.make_current()
    ok(driver.cuThreadExchangeStreamCaptureMode(RELAXED))
    while True:
        device.fold(memory, SIZE, total, stream)
        ok(driver.cuStreamSynchronize(stream))


def main() -> None:
    report = Report()
    device = Device()
    stream = new_stream()
    memory, total = allocate(SIZE), allocate(16)
    computed = bytearray(8)
    others = device, allocate(SIZE), allocate(16), new_stream()
    threading.Thread(target=compute, args=others, daemon=True).start()
    for step in report.steps():
        ok(driver.cuStreamBeginCapture(stream, MODES[step % len(MODES)]))
        device.advance(memory, SIZE, report.seed, stream)
        device.fold(memory, SIZE, total, stream)
        device.launch("stir", u64(total), stream=stream)
        graph = ok(driver.cuStreamEndCapture(stream))
        executable = ok(driver.cuGraphInstantiate(graph, 0))
        for _ in range(2):
            ok(driver.cuGraphLaunch(executable, stream))
        ok(driver.cuMemcpyDtoHAsync(computed, total, 8, stream))
        ok(driver.cuStreamSynchronize(stream))
        ok(driver.cuGraphExecDestroy(executable))
        ok(driver.cuGraphDestroy(graph))
        report.tell(step, bytes(computed))


if __name__ == "__main__":
    main()
