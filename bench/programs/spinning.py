"""Wait on the device, again and again, for a kernel that is launched later.

    python spinning.py [GAP]

One stream spins until another raises a flag, GAP milliseconds later (0), as communication kernels
do. Prints the number of each round.
"""

import itertools
import sys
import time
from ctypes import c_uint32, c_uint64

from cuda.bindings import driver
from device import context, functions, launch, ok

_SOURCE = b"""
extern "C" __global__ void wait_for(volatile unsigned* flag, unsigned value) {
    while (*flag < value) {}
}
extern "C" __global__ void raise(volatile unsigned* flag, unsigned value) { *flag = value; }
"""


def main() -> None:
    gap = float(sys.argv[1]) / 1e3 if len(sys.argv) > 1 else 0
    context()
    wait_for, raise_flag = functions(_SOURCE, b"wait_for", b"raise")
    waiting, raising = (ok(driver.cuStreamCreate(1)) for _ in range(2))
    flag = int(ok(driver.cuMemAlloc(4)))
    ok(driver.cuMemsetD32(flag, 0, 1))
    ok(driver.cuCtxSynchronize())
    for number in itertools.count(1):
        arguments = ((flag, number), (c_uint64, c_uint32))
        launch(wait_for, waiting, arguments)
        if gap:
            time.sleep(gap)
        launch(raise_flag, raising, arguments)
        ok(driver.cuStreamSynchronize(waiting))
        print(number, flush=True)


if __name__ == "__main__":
    main()
