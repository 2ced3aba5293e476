"""Three host threads and four streams; the streams wait for each other through events."""

import threading
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64
from typing import Any

from cuda.bindings import driver
from gpu import Device, Report, allocate, ok, read

SIZE = 256 << 10
WINDOW = 32 << 10


class Worker:
    """A host thread with a stream of its own that computes on a buffer when it is told to."""

    def __init__(self, device: Device, stream: Any, barrier: threading.Barrier) -> None:
        self.buffer = allocate(SIZE)
        self.total = allocate(16)
        self.seed = 0
        self.step = 0
        self._device, self._stream, self._barrier = device, stream, barrier
        self.done = ok(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._device.make_current()
        while True:
            self._barrier.wait()
            address = self.buffer + (self.step * WINDOW) % SIZE
            for turn in range(3):
                self._device.advance(address, WINDOW, self.seed + turn, self._stream)
            self._device.fold(address, WINDOW, self.total, self._stream)
            ok(driver.cuEventRecord(self.done, self._stream))
            self._barrier.wait()


def main() -> None:
    report = Report()
    device = Device()
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    streams = [ok(driver.cuStreamCreate(flags)) for _ in range(4)]
    barrier = threading.Barrier(3)
    workers = [Worker(device, stream, barrier) for stream in streams[:2]]
    total = allocate(16)
    flag = allocate(16)
    for step in report.steps():
        for worker in workers:
            worker.seed, worker.step = report.seed ^ id_of(workers, worker), step
        # The third stream waits on the device for what the fourth raises.
        device.launch("wait_for", u64(flag), u32(step + 1), u64(total), stream=streams[2])
        barrier.wait()
        device.launch("raise", u64(flag), u32(step + 1), stream=streams[3])
        barrier.wait()
        for worker in workers:
            ok(driver.cuStreamWaitEvent(streams[2], worker.done, 0))
            device.fold(worker.total, 16, total, streams[2])
        device.launch("stir", u64(total), stream=streams[2])
        ok(driver.cuStreamSynchronize(streams[2]))
        report.tell(step, read(total, 8))


def id_of(workers: list[Worker], worker: Worker) -> int:
    """A number that tells the workers apart."""
    return workers.index(worker) + 1


if __name__ == "__main__":
    main()
