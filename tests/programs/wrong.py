"""Writes where nothing that the driver is told says that it will: each step changes words of every
block of a field, in the way that the second argument names.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64
from typing import Any

from cuda.bindings import driver
from gpu import Report, allocate, ok, write
from launching import CHUNK, WORD, Field, Kernels, Opaque, Packed, blocks_for, filled, pointers_to
from mapping import tensor_map

BLOCKS = 6
COLD = 10
"""Blocks that are only saved: there is something to do for the movers while the program writes."""

Write = Callable[[int, int], None]
"""Carries out a step with a seed."""


def table_of(addresses: Sequence[int]) -> bytes:
    return b"".join(address.to_bytes(WORD, "little") for address in addresses)


def chase(kernels: Kernels, field: Field) -> Write:
    """Follows pointers that stand in device memory."""
    table = allocate(4096)
    write(table, table_of(field.blocks))
    return chasing(kernels, field, table)


def chase_pinned(kernels: Kernels, field: Field) -> Write:
    """Follows pointers that stand in mapped host memory."""
    pinned = int(ok(driver.cuMemHostAlloc(4096, driver.CU_MEMHOSTALLOC_DEVICEMAP)))
    table = table_of(field.blocks)
    ctypes.memmove(pinned, table, len(table))
    return chasing(kernels, field, int(ok(driver.cuMemHostGetDevicePointer(pinned, 0))))


def chasing(kernels: Kernels, field: Field, table: int) -> Write:
    blocks = len(field.blocks)

    def step(number: int, seed: int) -> None:
        first = u32(field.first(number))
        shape = u32(blocks), first, *field.shape()
        kernels.launch("chase", u64(table), *shape, u64(seed), threads=blocks * field.count)

    return step


def chase_in_graph(kernels: Kernels, field: Field) -> Write:
    """Follows pointers in a kernel of a graph, which was made once."""
    table = allocate(4096)
    write(table, table_of(field.blocks))
    blocks = len(field.blocks)
    node = driver.CUDA_KERNEL_NODE_PARAMS()
    node.func = kernels.function("chase")
    threads = blocks * field.count
    node.gridDimX, node.gridDimY, node.gridDimZ = blocks_for(threads), 1, 1
    node.blockDimX, node.blockDimY, node.blockDimZ = 64, 1, 1
    arguments = u64(table), u32(blocks), u32(0), *field.shape(), u64(7)
    pointers = pointers_to(arguments)
    node.kernelParams = ctypes.addressof(pointers)
    graph = ok(driver.cuGraphCreate(0))
    ok(driver.cuGraphAddKernelNode(graph, None, 0, node))
    runnable = ok(driver.cuGraphInstantiate(graph, 0))

    def step(_: int, __: int) -> None:
        ok(driver.cuGraphLaunch(runnable, 0))

    return step


def linked(kernels: Kernels, field: Field) -> Write:
    """Follows a list from one element to the next."""
    links = allocate(16 * len(field.blocks))
    nexts = [links + 16 * (i + 1) for i in range(len(field.blocks) - 1)] + [0]
    write(links, table_of([a for pair in zip(nexts, field.blocks, strict=True) for a in pair]))

    def step(number: int, seed: int) -> None:
        shape = u32(field.first(number)), *field.shape()
        kernels.launch("follow", u64(links), *shape, u64(seed), threads=field.count)

    return step


def neighbour(kernels: Kernels, field: Field) -> Write:
    """Writes beyond the memory that it is given, into what was allocated before or after it."""
    start = filled(CHUNK, 1)

    def step(number: int, seed: int) -> None:
        for address in field.at(number):
            reach = u64((address - start) // WORD & (1 << 64) - 1)
            kernels.launch(
                "overrun", u64(start), reach, *field.shape(), u64(seed), threads=field.count
            )

    return step


def masked(kernels: Kernels, field: Field) -> Write:
    """Is given addresses that do not look like any."""

    def step(number: int, seed: int) -> None:
        for address in field.at(number):
            hidden = u64(~address & (1 << 64) - 1)
            kernels.launch("masked", hidden, *field.shape(), u64(seed), threads=field.count)

    return step


def opaque(kernels: Kernels, field: Field) -> Write:
    """Is given a descriptor of 128 bytes that only the kernel understands."""

    def step(number: int, seed: int) -> None:
        for address in field.at(number):
            hidden = Opaque()
            hidden.parts[5] = seed
            hidden.parts[11] = seed ^ address
            kernels.launch("opaque", hidden, *field.shape(), u64(seed), threads=field.count)

    return step


def packed(kernels: Kernels, field: Field) -> Write:
    """Is given a structure in which the address is not aligned."""

    def step(number: int, seed: int) -> None:
        for address in field.at(number):
            cells = Packed(field.count, address, field.stride)
            kernels.launch("packed", cells, u64(seed), threads=field.count)

    return step


def halves(kernels: Kernels, field: Field) -> Write:
    """Is given an address in two parts."""

    def step(number: int, seed: int) -> None:
        count, stride = field.shape()
        for address in field.at(number):
            low, high = u32(address & 0xFFFFFFFF), u32(address >> 32)
            kernels.launch("halves", low, count, high, stride, u64(seed), threads=field.count)

    return step


def through_global(kernels: Kernels, field: Field) -> Write:
    """Takes the address from a variable of the module."""
    return through(kernels, field, "through_global", "target")


def through_constant(kernels: Kernels, field: Field) -> Write:
    """Takes the address from the constants of the module."""
    return through(kernels, field, "through_constant", "constant_target")


def through(kernels: Kernels, field: Field, kernel: str, variable: str) -> Write:
    place, _ = ok(driver.cuModuleGetGlobal(kernels.module, variable.encode()))

    def step(number: int, seed: int) -> None:
        for block in field.blocks:
            write(int(place), table_of([block]))
            shape = u32(field.first(number)), *field.shape()
            kernels.launch(kernel, *shape, u64(seed), threads=field.count)

    return step


def stored_map(kernels: Kernels, field: Field) -> Write:
    """Is given where in device memory a tensor map stands."""
    maps = allocate(128 * len(field.blocks))
    for number, block in enumerate(field.blocks):
        write(maps + 128 * number, bytes(tensor_map(block)))

    def step(number: int, seed: int) -> None:
        for place in range(len(field.blocks)):
            shape = u32(field.first(number)), *field.shape()
            where = u64(maps + 128 * place)
            kernels.launch("mapped_elsewhere", where, *shape, u64(seed), threads=field.count)

    return step


def host(_: Kernels, field: Field) -> Write:
    """The host writes the memory itself, as it may on the software GPU. It does so in a callback
    of a stream: while one runs, nothing is stopped.
    """
    wanted: list[tuple[int, int]] = []

    def change(_: Any) -> None:
        number, seed = wanted.pop()
        for address in field.at(number):
            for i in range(field.count):
                word = ctypes.c_uint64.from_address(address + i * WORD * field.stride)
                word.value = word.value * 3 + seed + i

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(change)
    function = driver.CUhostFn(ctypes.cast(callback, ctypes.c_void_p).value)

    def step(number: int, seed: int, kept: Any = callback) -> None:
        wanted.append((number, seed))
        ok(driver.cuLaunchHostFunc(0, function, 0))

    return step


WAYS = {
    way.__name__: way
    for way in (
        *(chase, chase_pinned, chase_in_graph, linked, neighbour, masked, opaque, packed, halves),
        *(through_global, through_constant, stored_map, host),
    )
}


def main() -> None:
    report = Report()
    kernels = Kernels()
    way = WAYS[sys.argv[2]]
    cold = [filled(CHUNK, 100 + i) for i in range(COLD)]
    field = Field([filled(CHUNK, 200 + i) for i in range(BLOCKS)])
    write_step = way(kernels, field)
    for step in report.steps():
        write_step(step, report.seed)
        ok(driver.cuCtxSynchronize())
        report.tell(step, field.peek(step) + bytes([len(cold)]))


if __name__ == "__main__":
    main()
