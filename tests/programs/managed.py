"""Keeps its state in managed memory, which the host touches, too.

No mode can save it, unless the hook puts managed memory into the host (PHOS_MANAGED=host).
"""

import ctypes

from cuda.bindings import driver
from gpu import Device, Report, allocate, ok, read

SIZE = 256 << 10


def allocate_managed(size: int) -> int:
    """Managed memory, which has been given advice and sent to the device."""
    flags = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL
    address = int(ok(driver.cuMemAllocManaged(size, flags.value)))
    here = driver.CUmemLocation()
    here.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    here.id = 0
    preferred = driver.CUmem_advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION
    ok(driver.cuMemAdvise(address, size, preferred, here))
    ok(driver.cuMemPrefetchAsync(address, size, here, 0, 0))
    attribute = driver.CUpointer_attribute
    found = {
        each: int(ok(driver.cuPointerGetAttribute(each, address + 1)))
        for each in (attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED,
                     attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                     attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                     attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE)
    }  # fmt: skip
    device = int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    assert list(found.values()) == [1, device, address + 1, size], found
    return address


def main() -> None:
    report = Report()
    device = Device()
    ok(driver.cuMemFree(allocate_managed(SIZE)))
    managed = allocate_managed(SIZE)
    host = (ctypes.c_uint32 * (SIZE // 4)).from_address(managed)
    ok(driver.cuMemsetD8(managed, 1, SIZE))
    total = allocate(16)
    for step in report.steps():
        device.advance(managed, SIZE, report.seed)
        device.fold(managed, SIZE, total)
        ok(driver.cuCtxSynchronize())
        host[step % len(host)] += 1
        report.tell(step, read(total, 8) + ctypes.string_at(managed, 16))


if __name__ == "__main__":
    main()
