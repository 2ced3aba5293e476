"""Writes where the arguments of its calls say that it may, in ways that are easily missed. Each
step changes words of every block of a field, in the way that the second argument names.
"""

import ctypes
import sys
from collections.abc import Callable
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64
from typing import Any

from cuda.bindings import driver
from gpu import Report, ok, read, write
from graphs import Graph
from launching import CHUNK, WORD, Cells, Field, Kernels, Other, Two, filled
from mapping import map_memory, mapped_side_by_side, properties, tensor_map

BLOCKS = 6
COLD = 10
"""Blocks that are only saved: there is something to do for the movers while the program writes."""

Write = Callable[[int, int], None]
"""Carries out a step with a seed."""


def by_value(kernels: Kernels, field: Field) -> Write:
    """The addresses stand in structures that are passed by value."""

    def step(number: int, seed: int) -> None:
        first, second, *rest = (Cells(a, field.count, field.stride) for a in field.at(number))
        kernels.launch("two_by_value", Two(7, first, second), u64(seed), threads=field.count)
        for cells in rest:
            kernels.launch("by_value", cells, u64(seed), threads=field.count)

    return step


def extra(kernels: Kernels, field: Field) -> Write:
    """The parameters come as one buffer."""

    def step(number: int, seed: int) -> None:
        for address in field.at(number):
            parameters = bytes(Cells(address, field.count, field.stride)) + bytes(u64(seed))
            kernels.launch_buffer("touch", parameters, threads=field.count)

    return step


def stale(kernels: Kernels, field: Field) -> Write:
    """Among the parameters are the address of a freed block, a number that looks like the address
    of one that is not written, and the address of one that is not used.
    """
    freed = filled(CHUNK, 1)
    ok(driver.cuMemFree(freed))
    idle = filled(CHUNK, 2)

    def step(number: int, seed: int) -> None:
        for address in field.at(number):
            kernels.launch(
                "with_stale", u64(freed), u64(idle + 8 * number), u64(idle), u64(address),
                *field.shape(), u64(seed), threads=field.count,
            )  # fmt: skip

    return step


def mapped(kernels: Kernels, field: Field) -> Write:
    """The address stands in a tensor map."""

    def step(number: int, seed: int) -> None:
        for address in field.at(number):
            kernels.launch(
                "mapped", tensor_map(address), *field.shape(), u64(seed), threads=field.count
            )

    return step


def side_by_side(kernels: Kernels, field: Field) -> Write:
    """One address is given, of memory that was mapped piece by piece and is used as a whole."""
    start = field.blocks[0]

    def step(number: int, seed: int) -> None:
        for address in field.at(number):
            reach = u64((address - start) // WORD)
            kernels.launch(
                "overrun", u64(start), reach, *field.shape(), u64(seed), threads=field.count
            )

    return step


def twice_mapped(kernels: Kernels, field: Field) -> Write:
    """The memory is mapped at two addresses, and written through the second."""
    second = int(ok(driver.cuMemAddressReserve(BLOCKS * CHUNK, 0, 0, 0)))
    for place in range(BLOCKS):
        handle = ok(driver.cuMemCreate(CHUNK, properties(), 0))
        first = field.blocks[place]
        content = read(first, CHUNK)
        ok(driver.cuMemUnmap(first, CHUNK))
        for address in (first, second + place * CHUNK):
            map_memory(handle, address)
        write(first, content)
        ok(driver.cuMemRelease(handle))

    def step(number: int, seed: int) -> None:
        for place in range(BLOCKS):
            address = u64(second + place * CHUNK + WORD * field.first(number))
            kernels.launch("touch", address, *field.shape(), u64(seed), threads=field.count)

    return step


def updated_graph(kernels: Kernels, field: Field) -> Write:
    """A graph whose nodes are given other addresses after it was made: one block at a time."""
    graph = Graph(kernels, field)

    def step(number: int, seed: int) -> None:
        for block in field.blocks:
            graph.aim(block, number, seed)
            graph.launch()

    return step


def replaced_graph(kernels: Kernels, field: Field) -> Write:
    """A graph that is updated as a whole from another of the same form."""
    runs = Graph(kernels, field)
    pattern = Graph(kernels, field)

    def step(number: int, seed: int) -> None:
        for block in field.blocks:
            pattern.aim(block, number, seed, only_pattern=True)
            runs.become(pattern)
            runs.launch()

    return step


def nested_graph(kernels: Kernels, field: Field) -> Write:
    """A graph within a graph."""
    inner = Graph(kernels, field)

    def step(number: int, seed: int) -> None:
        for block in field.blocks:
            inner.aim(block, number, seed, only_pattern=True)
            inner.launch_within_another()

    return step


def one_chunk(kernels: Kernels, field: Field) -> Write:
    """Two threads write words of the same chunk at the same time, each on a stream of its own."""
    flag = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    streams = [ok(driver.cuStreamCreate(flag)) for _ in range(2)]
    return two_threads(kernels, field, streams)


def thread_streams(kernels: Kernels, field: Field) -> Write:
    """The same on the default streams of the threads."""
    return two_threads(kernels, field, [driver.CUstream(driver.CU_STREAM_PER_THREAD)] * 2)


def default_stream(kernels: Kernels, field: Field) -> Write:
    """The same on stream 0: one for both, or one for each, as the program asked for."""
    return two_threads(kernels, field, [driver.CUstream(0)] * 2)


def two_threads(kernels: Kernels, field: Field, streams: list[Any]) -> Write:
    other = Other(kernels)

    def half(number: int, seed: int, which: int) -> None:
        for address in field.at(number):
            kernels.launch(
                *("touch", u64(address + which * WORD), *field.shape(), u64(seed + which)),
                threads=field.count, stream=streams[which],
            )  # fmt: skip
        ok(driver.cuStreamSynchronize(streams[which]))

    def step(number: int, seed: int) -> None:
        other.together(lambda: half(number, seed, 1), lambda: half(number, seed, 0))

    return step


def pinned(kernels: Kernels, field: Field) -> Write:
    """A host thread fills mapped host memory, from which a kernel takes what it writes."""
    other = Other(kernels)
    size = 4096
    host = int(ok(driver.cuMemHostAlloc(2 * size, driver.CU_MEMHOSTALLOC_DEVICEMAP)))
    device = int(ok(driver.cuMemHostGetDevicePointer(host, 0)))

    def fill(seed: int, which: int) -> None:
        ctypes.memmove(host + which * size, seed.to_bytes(8, "little") * (size // 8), size)

    def compute(number: int, seed: int, which: int) -> None:
        source = u64(device + which * size)
        for address in field.at(number):
            kernels.launch("blend", u64(address), source, u32(64), u64(seed), threads=64)
        ok(driver.cuCtxSynchronize())

    def step(number: int, seed: int) -> None:
        now, next_ = number % 2, 1 - number % 2
        other.together(lambda: fill(seed, next_), lambda: compute(number, seed, now))

    return step


def reallocated(kernels: Kernels, field: Field) -> Write:
    """Frees its blocks and makes new ones, most of which lie where others were."""
    blocks = list(field.blocks)
    field.blocks = blocks
    for place, block in enumerate(blocks):
        ok(driver.cuMemUnmap(block, CHUNK))
        blocks[place] = filled(CHUNK, place)

    def step(number: int, seed: int) -> None:
        place = number % BLOCKS
        content = read(blocks[place], CHUNK)
        ok(driver.cuMemFree(blocks[place]))
        blocks[place] = int(ok(driver.cuMemAlloc(CHUNK)))
        write(blocks[place], content)
        for address in field.at(number):
            kernels.launch("touch", u64(address), *field.shape(), u64(seed), threads=field.count)

    return step


def growing(kernels: Kernels, field: Field) -> Write:
    """Takes a chunk more in each step, and now and then frees all that it has taken."""
    taken: list[int] = []

    def step(number: int, seed: int) -> None:
        if len(taken) == 2 * BLOCKS:
            for block in taken:
                ok(driver.cuMemFree(block))
            taken.clear()
        taken.append(filled(CHUNK, number))
        for address in (*field.at(number), taken[-1]):
            kernels.launch("touch", u64(address), *field.shape(), u64(seed), threads=field.count)

    return step


def turned_over(kernels: Kernels, field: Field) -> Write:
    """Frees everything and makes it anew, in another size: what it has free, it has in full."""
    blocks = list(field.blocks)
    field.blocks = blocks
    for place, block in enumerate(blocks):
        ok(driver.cuMemUnmap(block, CHUNK))
        blocks[place] = filled(CHUNK, place)

    def step(number: int, seed: int) -> None:
        if number % 4 == 0:
            content = [read(block, CHUNK) for block in blocks]
            for block in blocks:
                ok(driver.cuMemFree(block))
            large = int(ok(driver.cuMemAlloc(BLOCKS * CHUNK)))
            write(large, b"".join(content))
            kernels.launch("touch", u64(large), u32(64), u32(1000), u64(seed), threads=64)
            content = [read(large + i * CHUNK, CHUNK) for i in range(BLOCKS)]
            ok(driver.cuMemFree(large))
            for place in range(BLOCKS):
                blocks[place] = int(ok(driver.cuMemAlloc(CHUNK)))
                write(blocks[place], content[place])
        for address in field.at(number):
            kernels.launch("touch", u64(address), *field.shape(), u64(seed), threads=field.count)

    return step


WAYS = {
    way.__name__: way
    for way in (
        *(
            by_value,
            extra,
            stale,
            mapped,
            side_by_side,
            twice_mapped,
            updated_graph,
            replaced_graph,
            nested_graph,
        ),
        *(one_chunk, thread_streams, default_stream, pinned, reallocated),
        *(turned_over, growing),
    )
}


def main() -> None:
    report = Report()
    kernels = Kernels()
    cold = [filled(CHUNK, 100 + i) for i in range(COLD)]
    field = Field(mapped_side_by_side(BLOCKS))
    write_step = WAYS[sys.argv[2]](kernels, field)
    for step in report.steps():
        write_step(step, report.seed)
        ok(driver.cuCtxSynchronize())
        report.tell(step, field.peek(step) + bytes([len(cold)]))


if __name__ == "__main__":
    main()
