"""Many doors to memory: events, stream-ordered memory, own VMM mappings (two views of one handle),
pitched and pinned memory, module variables. The state travels through all of them at each step.
"""

import ctypes
from ctypes import c_uint64 as u64
from typing import Any

from cuda.bindings import driver
from gpu import Device, Report, allocate, ok, read

SIZE = 64 << 10
ROW = 1000
ROWS = 64


class Mapping:
    """One physical allocation of the program's own, mapped at two addresses in one range."""

    def __init__(self, device: Device) -> None:
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = device.ordinal
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.size = int(ok(driver.cuMemGetAllocationGranularity(prop, minimum)))
        self.handle = ok(driver.cuMemCreate(self.size, prop, 0))
        self.range = int(ok(driver.cuMemAddressReserve(2 * self.size, 0, 0, 0)))
        self._access = driver.CUmemAccessDesc()
        self._access.location = prop.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for address in (self.range, self.range + self.size):
            ok(driver.cuMemMap(address, self.size, 0, self.handle, 0))
        ok(driver.cuMemSetAccess(self.range, 2 * self.size, [self._access], 1))
        ok(driver.cuMemsetD8(self.range, 7, self.size))

    def remap(self) -> None:
        """Unmap the second view and map it again: handles must stay good."""
        second = self.range + self.size
        ok(driver.cuMemUnmap(second, self.size))
        ok(driver.cuMemMap(second, self.size, 0, self.handle, 0))
        ok(driver.cuMemSetAccess(second, self.size, [self._access], 1))


def copy_rows(source: int, target: int, pitch: int, stream: Any) -> None:
    """Copy a pitched picture to a dense one."""
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.srcPitch = source, pitch
    copy.dstDevice, copy.dstPitch = target, ROW
    copy.WidthInBytes, copy.Height = ROW, ROWS
    ok(driver.cuMemcpy2DAsync(copy, stream))


def main() -> None:
    report = Report()
    device = Device()
    stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    mapping = Mapping(device)
    picture, pitch = (int(v) for v in ok(driver.cuMemAllocPitch(ROW, ROWS, 16)))
    ok(driver.cuMemsetD2D8(picture, pitch, 3, ROW, ROWS))
    dense = allocate(SIZE)
    kept = ok(driver.cuMemAllocAsync(SIZE, stream))
    ok(driver.cuMemsetD8Async(kept, 1, SIZE, stream))
    pinned = int(ok(driver.cuMemHostAlloc(SIZE, driver.CU_MEMHOSTALLOC_DEVICEMAP)))
    ctypes.memset(pinned, 5, SIZE)
    table, table_size = ok(driver.cuModuleGetGlobal(device.module, b"salt"))
    total = allocate(16)
    start, end = (ok(driver.cuEventCreate(0)) for _ in range(2))
    ok(driver.cuCtxSynchronize())
    for step in report.steps():
        ok(driver.cuEventRecord(start, stream))
        # Device: pitched -> dense -> kept; a temporary that lives for this step only.
        device.advance(picture + (step % ROWS) * pitch, ROW // 16 * 16, report.seed, stream)
        copy_rows(picture, dense, pitch, stream)
        temporary = ok(driver.cuMemAllocAsync(SIZE, stream))
        ok(driver.cuMemcpyDtoDAsync(temporary, kept, SIZE, stream))
        device.advance(int(temporary), SIZE, report.seed + 1, stream)
        device.fold(dense, ROW * ROWS // 16 * 16, total, stream)
        ok(driver.cuMemcpyDtoDAsync(kept, temporary, SIZE, stream))
        ok(driver.cuMemFreeAsync(temporary, stream))
        # The program's mapping: written through one view, read through the other.
        window = mapping.size // 16
        offset = (step % 16) * window
        device.advance(mapping.range + offset, window // 4, report.seed + 2, stream)
        device.fold(mapping.range + mapping.size + offset, window, total, stream)
        # Pinned memory: the kernel computes on it in place.
        mapped = int(ok(driver.cuMemHostGetDevicePointer(pinned, 0)))
        device.advance(mapped, SIZE // 4, report.seed + 3, stream)
        device.fold(int(kept), SIZE, total, stream)
        device.launch("stir", u64(total), stream=stream)
        ok(driver.cuEventRecord(end, stream))
        ok(driver.cuEventSynchronize(end))
        if ok(driver.cuEventElapsedTime(start, end)) < 0:
            raise RuntimeError("time ran backwards")
        if step % 5 == 4:
            mapping.remap()
        report.tell(step, read(total, 8) + seen(pinned) + read(int(table), int(table_size)))


def seen(pinned: int) -> bytes:
    """What the host sees in the pinned memory."""
    return ctypes.string_at(pinned, SIZE)


if __name__ == "__main__":
    main()
