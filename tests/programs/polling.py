"""Threads that poll: whether a stream, and an event on it, are done, without ever resting.

``PHOS_TEST_POLLERS`` is their number (default 4).
"""

import ctypes
import os
import threading

from cuda.bindings import driver
from gpu import Device, Report, State, ok

SUCCESS, NOT_READY = 0, 600


class Pollers:
    """Threads that ask the driver again and again, as those of frameworks do."""

    def __init__(self, device: Device, count: int) -> None:
        self._device = device
        self._libcuda = ctypes.CDLL("libcuda.so.1")
        self._event = ok(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self.wrong: list[int] = []
        for _ in range(count):
            threading.Thread(target=self._poll, daemon=True).start()

    def record(self) -> None:
        """Let the event wait for all work so far."""
        ok(driver.cuEventRecord(self._event, 0))

    def _poll(self) -> None:
        self._device.make_current()
        event = ctypes.c_void_p(int(self._event))
        while not self.wrong:
            answers = (self._libcuda.cuStreamQuery(None), self._libcuda.cuEventQuery(event))
            self.wrong += [answer for answer in answers if answer not in (SUCCESS, NOT_READY)]


def main() -> None:
    report = Report()
    device = Device()
    state = State(device)
    pollers = Pollers(device, int(os.environ.get("PHOS_TEST_POLLERS", "4")))
    for step in report.steps():
        value = state.step(step, report.seed)
        pollers.record()
        if pollers.wrong:
            raise RuntimeError(f"polling was answered with {pollers.wrong}")
        report.tell(step, value)


if __name__ == "__main__":
    main()
