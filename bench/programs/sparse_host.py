"""Keep what a GPU computes in host memory of which only a hundredth is ever written.

    python sparse_host.py [--gib N]

Each step computes numbers in device memory, from a page of the host's memory, and copies them into
another page, in an order that jumps.
"""

import argparse
import mmap
from collections.abc import Iterator

import numpy
from cuda.bindings import driver
from device import context, functions, ok
from lines import print_lines

_PAGE = 4096
_ONE_OF = 100
"""The share of the pages that is written."""
_JUMP = 7919
_SOURCE = b"""
extern "C" __global__ void advance(unsigned* numbers, unsigned step) {
    numbers[threadIdx.x] = numbers[threadIdx.x] * 1664525u + 1013904223u + (threadIdx.x ^ step);
}
"""


def values(gib: int) -> Iterator[float]:
    """Yield a number of each page that is written."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    host = numpy.frombuffer(mmap.mmap(-1, gib << 30, flags=private), numpy.uint32)
    pages = host.reshape(-1, _PAGE // 4)
    count = len(pages) // _ONE_OF
    context()
    (advance,) = functions(_SOURCE, b"advance")
    numbers = ok(driver.cuMemAlloc(_PAGE))
    where, step = (numpy.array([value], numpy.uint64) for value in (int(numbers), 0))
    arguments = numpy.array([where.ctypes.data, step.ctypes.data], numpy.uint64)
    for number in range(1 << 62):
        for at in range(number * 64, number * 64 + 64):
            before, now = (pages[each * _JUMP % count * _ONE_OF] for each in (at, at + 1))
            ok(driver.cuMemcpyHtoD(numbers, before.ctypes.data, _PAGE))
            step[0] = at
            shape = (1, 1, 1, _PAGE // 4, 1, 1)
            ok(driver.cuLaunchKernel(advance, *shape, 0, 0, arguments.ctypes.data, 0))
            ok(driver.cuMemcpyDtoH(now.ctypes.data, numbers, _PAGE))
        yield float(now[number % len(now)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=40)
    print_lines(values(parser.parse_args().gib))
