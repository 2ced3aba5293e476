"""Iterate over arrays of CuPy, with several streams, a library, or the driver's own pool.

python arrays.py streams|async|fft|solver [--resident GB]
"""

import argparse
from collections.abc import Iterator

import cupy
from lines import print_lines


def streams(resident: int) -> Iterator[float]:
    """Four streams, each with an array of its own, joined at each step."""
    given = [cupy.random.default_rng(n).random((1024, 1024)) for n in range(4)]
    kept = cupy.arange(resident << 27, dtype=cupy.float64)
    ways = [cupy.cuda.Stream(non_blocking=True) for _ in given]
    while True:
        for number, way in enumerate(ways):
            with way:
                given[number] = cupy.tanh(given[number] @ given[number].T / 1024 + 0.1)
        for way in ways:
            way.synchronize()
        if resident:
            kept += 1
        yield sum(float(each.sum()) for each in given) + (float(kept[-1]) if resident else 0.0)


def spectra() -> Iterator[float]:
    """cuFFT, whose plan has memory of its own."""
    given = cupy.random.default_rng(1).random((64, 1 << 16))
    while True:
        found = cupy.fft.rfft(given, axis=1)
        given = cupy.fft.irfft(found * cupy.exp(-1e-4j), n=1 << 16, axis=1)
        yield float(cupy.abs(given).sum())


def solved() -> Iterator[float]:
    """cuSOLVER and cuBLAS."""
    matrix = cupy.random.default_rng(1).random((768, 768)) + 768 * cupy.eye(768)
    right = cupy.ones(768)
    while True:
        right = cupy.linalg.solve(matrix, right) * 769 + 1e-3
        factors, _ = cupy.linalg.qr(matrix)
        yield float(right.sum() + cupy.abs(factors).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("streams", "async", "fft", "solver"))
    parser.add_argument("--resident", type=int, default=0, metavar="GB")
    arguments = parser.parse_args()
    if arguments.way == "async":
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
    if arguments.way == "fft":
        print_lines(spectra())
    elif arguments.way == "solver":
        print_lines(solved())
    else:
        print_lines(streams(arguments.resident))


if __name__ == "__main__":
    main()
