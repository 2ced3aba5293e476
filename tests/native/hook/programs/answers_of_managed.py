"""Prints what the driver says of managed memory, and to calls that are wrong about it."""

import ctypes
import json
from typing import Any

from cuda.bindings import driver
from gpu import Device, ok

SIZE = 3 << 20
ATTRIBUTE = driver.CUpointer_attribute
PLAIN = (
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_IS_MANAGED,
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_MAPPED,
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE,
)
PLACED = (
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_HOST_POINTER,
    ATTRIBUTE.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
)


def said(answer: tuple[Any, ...]) -> list[object]:
    """The name of the result, and what is with it."""
    return [answer[0].name, *(int(each) for each in answer[1:])]


def main() -> None:
    device = Device()
    everywhere = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
    here = driver.CUmemLocation()
    here.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    here.id = device.ordinal
    read_mostly = driver.CUmem_advise.CU_MEM_ADVISE_SET_READ_MOSTLY
    unknown = driver.CUmem_range_attribute.CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY

    found: dict[str, object] = {
        "no size": said(driver.cuMemAllocManaged(0, everywhere)[:1]),
        "no flags": said(driver.cuMemAllocManaged(SIZE, 0)[:1]),
        "for one stream": said(driver.cuMemAllocManaged(SIZE, 4)[:1]),
    }
    start = int(ok(driver.cuMemAllocManaged(SIZE, everywhere)))
    for each in PLAIN:
        found[each.name] = said(driver.cuPointerGetAttribute(each, start + 5))
    for each in PLACED:
        name, value = said(driver.cuPointerGetAttribute(each, start + 5))
        found[each.name] = [name, int(str(value)) - start]
    base, size = ok(driver.cuMemGetAddressRange(start + 7))
    found["range"] = [int(base) - start, int(size)]
    found["prefetch"] = said(driver.cuMemPrefetchAsync(start, SIZE, here, 0, 0))
    found["prefetch too much"] = said(driver.cuMemPrefetchAsync(start + 1, SIZE, here, 0, 0))
    found["prefetch nothing"] = said(driver.cuMemPrefetchAsync(start, 0, here, 0, 0))
    found["advise"] = said(driver.cuMemAdvise(start, 4096, read_mostly, here))
    found["advise too much"] = said(driver.cuMemAdvise(start + 4096, SIZE, read_mostly, here))
    unset = driver.CUmem_advise.CU_MEM_ADVISE_UNSET_READ_MOSTLY
    found["take advice back"] = said(driver.cuMemAdvise(start, 4096, unset, here))
    found["attach"] = said(driver.cuStreamAttachMemAsync(0, start, 0, everywhere))
    found["ask a range"] = said(driver.cuMemRangeGetAttribute(4, unknown, start, 4096))
    ok(driver.cuMemsetD8(start, 7, SIZE))
    ok(driver.cuCtxSynchronize())
    found["bytes"] = ctypes.string_at(start + SIZE - 4, 4).hex()
    found["free inside"] = said(driver.cuMemFree(start + 64))
    found["free as host memory"] = said(driver.cuMemFreeHost(start))
    found["free"] = said(driver.cuMemFree(start))
    found["free again"] = said(driver.cuMemFree(start))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
