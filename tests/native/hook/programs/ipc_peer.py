"""Opens the handles that it is given on stdin, checks the bytes and writes others."""

import ctypes
import sys
from typing import Any

from cuda.bindings import driver

SIZES = (1000, 4096, 3 << 20)


def ok(result: Any) -> Any:
    """The values of a driver call, which must have succeeded."""
    status, *values = result
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return values[0] if len(values) == 1 else values


ok(driver.cuInit(0))
context = ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))
ok(driver.cuCtxSetCurrent(context))
for number, line in enumerate(sys.stdin):
    handle = driver.CUipcMemHandle()
    given = bytes.fromhex(line)
    ctypes.memmove(handle.getPtr(), given, len(given))
    address = ok(driver.cuIpcOpenMemHandle(handle, 1))
    assert int(ok(driver.cuIpcOpenMemHandle(handle, 1))) == int(address)
    assert ok(driver.cuMemGetAddressRange(int(address) + 5))[1] == SIZES[number]
    values = bytearray(SIZES[number])
    ok(driver.cuMemcpyDtoH(values, address, len(values)))
    print(set(values) == {number + 1}, flush=True)
    ok(driver.cuMemsetD8(address, number + 101, SIZES[number]))
    ok(driver.cuCtxSynchronize())
    ok(driver.cuIpcCloseMemHandle(address))
    ok(driver.cuIpcCloseMemHandle(address))
    status = driver.cuIpcCloseMemHandle(address)[0]
    assert status != driver.CUresult.CUDA_SUCCESS
