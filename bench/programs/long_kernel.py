"""Keep the device busy with one kernel after another that waits for nothing.

    python long_kernel.py [MILLISECONDS]

Each kernel takes that many milliseconds (300). Prints the number of each.
"""

import itertools
import sys
from ctypes import c_uint64

from cuda.bindings import driver
from device import context, functions, launch, ok

_SOURCE = b"""
extern "C" __global__ void busy(unsigned long long nanoseconds) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}
"""


def main() -> None:
    nanoseconds = int(float(sys.argv[1] if len(sys.argv) > 1 else 300) * 1e6)
    context()
    (busy,) = functions(_SOURCE, b"busy")
    stream = ok(driver.cuStreamCreate(1))
    for number in itertools.count(1):
        launch(busy, stream, ((nanoseconds,), (c_uint64,)))
        ok(driver.cuStreamSynchronize(stream))
        print(number, flush=True)


if __name__ == "__main__":
    main()
