"""Memory that a program maps itself, and tensor maps."""

import ctypes
import random

from cuda.bindings import driver
from gpu import ok, write
from launching import CHUNK, Opaque


def properties(ordinal: int = 0) -> "driver.CUmemAllocationProp":
    """Those of plain memory on a device."""
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = ordinal
    return prop


def mapped_side_by_side(count: int) -> list[int]:
    """Blocks of one chunk, each of its own memory, one after the other in one range of addresses;
    no two words are the same.
    """
    start = int(ok(driver.cuMemAddressReserve(count * CHUNK, 0, 0, 0)))
    blocks = [start + i * CHUNK for i in range(count)]
    for block in blocks:
        handle = ok(driver.cuMemCreate(CHUNK, properties(), 0))
        map_memory(handle, block)
        ok(driver.cuMemRelease(handle))  # the mapping keeps the memory
        write(block, random.Random(block - start).randbytes(CHUNK))
    return blocks


def map_memory(handle: "driver.CUmemGenericAllocationHandle", address: int) -> None:
    """Map a chunk of memory for the device."""
    ok(driver.cuMemMap(address, CHUNK, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location = properties().location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    ok(driver.cuMemSetAccess(address, CHUNK, [access], 1))


def tensor_map(address: int) -> Opaque:
    """A map of the memory from ``address`` (a multiple of 16) on, as the driver encodes it. The
    software GPU puts the address first, and the kernels here know that.
    """
    room = ctypes.create_string_buffer(2 * ctypes.sizeof(Opaque))
    opaque = Opaque.from_buffer(room, -ctypes.addressof(room) % 64)  # it must be aligned
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    uint32 = int(driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT32)
    result = encode(
        *(ctypes.byref(opaque), uint32, 2, u64(address)),
        *((u64 * 2)(256, 64), (u64 * 1)(1024), (u32 * 2)(64, 8), (u32 * 2)(1, 1)),
        *(0, 0, 0, 0),
    )
    if result != 0 or opaque.parts[0] != address:
        raise RuntimeError(f"cuTensorMapEncodeTiled answered {result}, and {opaque.parts[0]:#x}")
    return opaque
