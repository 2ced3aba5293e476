"""Gives memory to another process by legacy CUDA IPC, and looks at what that one wrote.

Two small allocations of one slab and a large one; handles go out on stdout, one line of hex each.
"""

import ctypes
import sys
from typing import Any

from cuda.bindings import driver

SIZES = (1000, 4096, 3 << 20)
BYTES = 64  # of a CUipcMemHandle


def ok(result: Any) -> Any:
    """The values of a driver call, which must have succeeded."""
    status, *values = result
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return values[0] if len(values) == 1 else values


ok(driver.cuInit(0))
context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))
ok(driver.cuCtxSetCurrent(context))
memory = [ok(driver.cuMemAlloc(size)) for size in SIZES]
for number, address in enumerate(memory):
    ok(driver.cuMemsetD8(address, number + 1, SIZES[number]))
    handle = ok(driver.cuIpcGetMemHandle(address))
    print(ctypes.string_at(handle.getPtr(), BYTES).hex(), flush=True)
sys.stdin.readline()  # the peer is done
for number, address in enumerate(memory):
    values = bytearray(SIZES[number])
    ok(driver.cuMemcpyDtoH(values, address, len(values)))
    print(set(values) == {number + 101}, flush=True)
sys.stdin.readline()
