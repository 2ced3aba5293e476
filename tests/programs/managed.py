"""Keeps its state in managed memory, which no mode can checkpoint."""

from cuda.bindings import driver
from gpu import Device, Report, allocate, ok, read

SIZE = 256 << 10


def main() -> None:
    report = Report()
    device = Device()
    flags = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
    managed = int(ok(driver.cuMemAllocManaged(SIZE, flags.value)))
    ok(driver.cuMemsetD8(managed, 1, SIZE))
    total = allocate(16)
    for step in report.steps():
        device.advance(managed, SIZE, report.seed)
        device.fold(managed, SIZE, total)
        report.tell(step, read(total, 8))


if __name__ == "__main__":
    main()
