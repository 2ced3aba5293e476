"""Iterate a recurrence over numbers in device memory, which depend on all steps before.

    python recurrence.py [--steps N] [--save-every N] [--mib N] [--pause SECONDS]

Prints a line per step with the exclusive or of all numbers. With ``--save-every`` the program saves
itself each so many steps. It needs neither a library nor a real GPU.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy
import own
from cuda.bindings import driver
from device import context, functions, ok
from lines import print_lines

_THREADS = 128
_SOURCE = b"""
extern "C" __global__ void advance(unsigned* numbers, unsigned step) {
    unsigned at = blockIdx.x * blockDim.x + threadIdx.x;
    numbers[at] = numbers[at] * 1664525u + 1013904223u + (at ^ step);
}
"""
"""With the factors of Numerical Recipes' generator."""


def values(count: int, pause: float) -> Iterator[float]:
    """Yield the exclusive or of ``count`` numbers after each step."""
    context()
    (advance,) = functions(_SOURCE, b"advance")
    host = numpy.arange(count, dtype=numpy.uint32)
    numbers = ok(driver.cuMemAlloc(host.nbytes))
    ok(driver.cuMemcpyHtoD(numbers, host.ctypes.data, host.nbytes))
    step = numpy.zeros(1, dtype=numpy.uint32)
    where = numpy.array([int(numbers)], dtype=numpy.uint64)
    arguments = numpy.array([where.ctypes.data, step.ctypes.data], dtype=numpy.uint64)
    together: Any = numpy.bitwise_xor  # whose types are not the same in each release of numpy
    while True:
        shape = (count // _THREADS, 1, 1, _THREADS, 1, 1)
        ok(driver.cuLaunchKernel(advance, *shape, 0, 0, arguments.ctypes.data, 0))
        ok(driver.cuMemcpyDtoH(host.ctypes.data, numbers, host.nbytes))
        step += 1
        time.sleep(pause)
        yield float(together.reduce(host))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=0, help="0: until killed")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS")
    parser.add_argument("--mib", type=int, default=1, help="device memory")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds of rest in each step")
    arguments = parser.parse_args()
    told = own.Told() if arguments.save_every else None
    points = own.steps(arguments.save_every).come_to if told is not None else None
    print_lines(values(arguments.mib << 18, arguments.pause), arguments.steps, points)
    if told is not None:
        told.end()


if __name__ == "__main__":
    main()
