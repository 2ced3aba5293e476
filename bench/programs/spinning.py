"""Wait on the device, again and again, for a kernel that is launched later.

    python spinning.py

One stream spins until another raises a flag, as communication kernels do. Prints the number of each
round. NVRTC compiles the kernels.
"""

import itertools
from ctypes import c_uint32, c_uint64
from typing import Any

from cuda.bindings import driver, nvrtc

_SOURCE = b"""
extern "C" __global__ void wait_for(volatile unsigned* flag, unsigned value) {
    while (*flag < value) {}
}
extern "C" __global__ void raise(volatile unsigned* flag, unsigned value) { *flag = value; }
"""


def ok(result: tuple[Any, ...]) -> Any:
    """Return the value of a call. Raises :class:`RuntimeError` when it failed."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA says {status!r}")
    return values[0] if values else None


def compiled() -> bytes:
    """Return the PTX of the kernels."""
    program = ok(nvrtc.nvrtcCreateProgram(_SOURCE, b"spinning.cu", 0, [], []))
    ok(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"]))
    ptx = b" " * int(ok(nvrtc.nvrtcGetPTXSize(program)))
    ok(nvrtc.nvrtcGetPTX(program, ptx))
    return ptx


def main() -> None:
    ok(driver.cuInit(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))))
    module = ok(driver.cuModuleLoadData(compiled()))
    wait_for = ok(driver.cuModuleGetFunction(module, b"wait_for"))
    raise_flag = ok(driver.cuModuleGetFunction(module, b"raise"))
    waiting, raising = (ok(driver.cuStreamCreate(1)) for _ in range(2))
    flag = int(ok(driver.cuMemAlloc(4)))
    ok(driver.cuMemsetD32(flag, 0, 1))
    ok(driver.cuCtxSynchronize())
    types = (c_uint64, c_uint32)
    for number in itertools.count(1):
        for kernel, stream in ((wait_for, waiting), (raise_flag, raising)):
            ok(
                driver.cuLaunchKernel(
                    kernel, 1, 1, 1, 1, 1, 1, 0, stream, ((flag, number), types), 0
                )
            )
        ok(driver.cuStreamSynchronize(waiting))
        print(number, flush=True)


if __name__ == "__main__":
    main()
