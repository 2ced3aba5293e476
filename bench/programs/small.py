"""Fill 4 MiB of device memory with a different byte, again and again.

    python small.py

Prints one line per step: number, the byte that is there as a hexadecimal float, seconds, and end on
the monotonic clock.
"""

import time
from typing import Any

from cuda.bindings import driver

_BYTES = 4 << 20
_PAUSE = 0.2


def ok(result: tuple[Any, ...]) -> Any:
    """Return the value of a driver call. Raises :class:`RuntimeError` when it failed."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the driver says {status.name}")
    return values[0] if values else None


def main() -> None:
    ok(driver.cuInit(0))
    device = ok(driver.cuDeviceGet(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(device))))
    memory = int(ok(driver.cuMemAlloc(_BYTES)))
    last = bytearray(1)
    step = 0
    while True:
        start = time.monotonic()
        ok(driver.cuMemsetD8(memory, step % 256, _BYTES))
        ok(driver.cuMemcpyDtoH(last, memory + _BYTES - 1, 1))
        end = time.monotonic()
        print(step, float(last[0]).hex(), f"{end - start:.6f} {end:.6f}", flush=True)
        step += 1
        time.sleep(_PAUSE)


if __name__ == "__main__":
    main()
