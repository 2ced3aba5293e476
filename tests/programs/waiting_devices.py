"""Two devices in one process, a thread each, whose kernels spin for each other.

With the word ``copies`` after the number of steps they wait for their devices by copying.
"""

import sys
import threading

from cuda.bindings import driver
from exchange import BOARD, Rank
from gpu import Device, Report, allocate, ok


def second(report: Report, device: Device, chunk_map: int) -> None:
    device.make_current()
    rank = Rank(device, chunk_map, 1, copies="copies" in sys.argv)
    for step in report.steps():
        rank.step(step, step)


def main() -> None:
    report = Report()
    other, device = Device(1), Device(0)
    chunk_map = allocate(BOARD)
    other.make_current()
    ok(driver.cuCtxEnablePeerAccess(device.context, 0))
    device.make_current()
    rank = Rank(device, chunk_map, 0, copies="copies" in sys.argv)
    threading.Thread(target=second, args=(Report(), other, chunk_map), daemon=True).start()
    for step in report.steps():
        report.tell(step, rank.step(step, report.seed))


if __name__ == "__main__":
    main()
