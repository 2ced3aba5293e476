"""Iterate a heat equation with kernels that are compiled while the program runs.

    python jitted.py numba|core

By numba-cuda, or by cuda.core from CUDA C++ (NVRTC).
"""

import argparse
from collections.abc import Iterator
from typing import Any

import numpy
from lines import print_lines

_SIDE = 2048


def numba_cuda() -> Any:
    """Return the module ``numba.cuda``."""
    if not hasattr(numpy, "row_stack"):  # numba-cuda 0.30 asks for it; numpy 2.5 has it no more
        vars(numpy)["row_stack"] = numpy.vstack
    from numba import cuda

    return cuda


def by_numba() -> Iterator[float]:
    cuda = numba_cuda()

    @cuda.jit
    def spread(given, found):  # type: ignore[no-untyped-def]
        row, column = cuda.grid(2)
        if 0 < row < _SIDE - 1 and 0 < column < _SIDE - 1:
            around = given[row - 1, column] + given[row + 1, column]
            around += given[row, column - 1] + given[row, column + 1]
            found[row, column] = 0.2 * (given[row, column] + around)

    plate = numpy.random.default_rng(1).random((_SIDE, _SIDE))
    given, found = cuda.to_device(plate), cuda.to_device(plate)
    while True:
        for _ in range(50):
            spread[(_SIDE // 16, _SIDE // 16), (16, 16)](given, found)
            given, found = found, given
        yield float(given.copy_to_host().sum())


_SOURCE = """
extern "C" __global__ void spread(const double* given, double* found, int side) {
    int row = blockIdx.y * blockDim.y + threadIdx.y, column = blockIdx.x * blockDim.x + threadIdx.x;
    if (row > 0 && column > 0 && row < side - 1 && column < side - 1) {
        int at = row * side + column;
        found[at] = 0.2 * (given[at] + given[at - 1] + given[at + 1] + given[at - side] +
                           given[at + side]);
    }
}
"""


def by_core() -> Iterator[float]:
    from cuda.core import Device, LaunchConfig, LegacyPinnedMemoryResource, Program, launch

    device = Device()
    device.set_current()
    stream = device.create_stream()
    kernel = Program(_SOURCE, "c++").compile("cubin").get_kernel("spread")
    plate = numpy.random.default_rng(1).random((_SIDE, _SIDE))
    host = LegacyPinnedMemoryResource().allocate(plate.nbytes)
    seen = numpy.from_dlpack(host).view(numpy.float64).reshape(_SIDE, _SIDE)
    seen[:] = plate
    given = device.memory_resource.allocate(plate.nbytes, stream=stream)
    found = device.memory_resource.allocate(plate.nbytes, stream=stream)
    for each in (given, found):
        each.copy_from(host, stream=stream)
    shape = LaunchConfig(grid=(_SIDE // 16, _SIDE // 16), block=(16, 16))
    while True:
        for _ in range(50):
            launch(stream, shape, kernel, given, found, numpy.int32(_SIDE))
            given, found = found, given
        given.copy_to(host, stream=stream)
        stream.sync()
        yield float(seen.sum())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("numba", "core"))
    print_lines(by_numba() if parser.parse_args().way == "numba" else by_core())
