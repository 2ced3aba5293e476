"""Takes all device memory that is free, says how much, and keeps it until it is killed."""

import time

from cuda.bindings import driver

from gpu import ok  # isort: skip

SMALLEST = 2 << 20


def main() -> None:
    ok(driver.cuInit(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))))
    taken, size = 0, 1 << 40
    while size >= SMALLEST:
        status, _ = driver.cuMemAlloc(size)
        if status == driver.CUresult.CUDA_SUCCESS:
            taken += size
        else:
            size //= 2
    print(f"took {taken}", flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
