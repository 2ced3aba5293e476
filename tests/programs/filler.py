"""Takes all device memory but as many bytes as the second argument says, of every GPU that it sees.
It prints "took" and how much, and keeps it until it is killed.
"""

import sys
import time

from cuda.bindings import driver
from gpu import ok

BLOCK = 2 << 20


def fill(ordinal: int, leave: int) -> int:
    """Take memory of a device; how many bytes."""
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(ordinal))))))
    taken = 0
    while (free := int(ok(driver.cuMemGetInfo())[0]) - leave) >= BLOCK:
        ok(driver.cuMemAlloc(free // BLOCK * BLOCK))
        taken += free // BLOCK * BLOCK
    return taken


def main() -> None:
    ok(driver.cuInit(0))
    taken = [fill(n, int(sys.argv[2])) for n in range(int(ok(driver.cuDeviceGetCount())))]
    print(f"took {taken}", flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
