"""Random programs, one after the other: random kernels, copies, fills, graphs, streams, allocations
and frees. Number n begins with a line ``program <n>``, or ``program <n> hides`` when it does not
tell the driver what it writes, and runs until there is a file ``end-<n>`` in the working folder.
What it computes depends on n alone, whatever the streams do.
"""

import random
import sys
from collections.abc import Callable
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda.bindings import driver
from gpu import Report, ok, read, write
from graphs import Graph
from launching import CHUNK, WORD, Cells, Field, Kernels, Other
from mapping import map_memory, properties

SIZES = (4096, 65536, 300_000, 1 << 20, CHUNK, CHUNK + 16, 3 << 20, 5 << 20)
MOST = 14 << 20
"""Bytes that a program has at most, when it begins."""
NON_BLOCKING = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
HIDING = 8
"""One program in so many has a kernel that hides what it writes."""


def hides(number: int) -> bool:
    """Whether the program is one that cannot be guessed right."""
    return number % HIDING == HIDING - 1


@dataclass
class Buffer:
    """Device memory, and the event after what was done with it last."""

    kind: str
    address: int
    size: int
    done: Any

    @property
    def words(self) -> int:
        return self.size // WORD


class Program:
    """One random program."""

    def __init__(self, kernels: Kernels, other: Other, number: int) -> None:
        self._kernels = kernels
        self._other = other
        self._chance = random.Random(number)
        count = self._chance.randrange(1, 4)
        self._streams: list[Any] = [driver.CUstream(0)]
        self._streams += [ok(driver.cuStreamCreate(NON_BLOCKING)) for _ in range(count)]
        self._buffers: list[Buffer] = []
        while sum(buffer.size for buffer in self._buffers) < MOST - SIZES[-1]:
            self._buffers.append(self._allocate())
        self._graph_block = self._allocate("mapped")
        self._graph = Graph(kernels, Field([self._graph_block.address]))
        self._works: list[Callable[[Any, int], Callable[[], object]]] = [
            *(self._touch, self._blend, self._by_value, self._scatter, self._copy, self._send),
            *(self._fill, self._fill_rows, self._set, self._run_graph),
        ]
        if hides(number):
            self._works += [self._hide] * 4

    def step(self, number: int) -> bytes:
        """Some random work; a part of the memory afterwards."""
        chance = self._chance
        for _ in range(chance.randrange(1, 5)):
            if chance.random() < 0.15:
                self._replace(chance.choice(self._buffers))
            elif chance.random() < 0.2:
                self._two_threads(number)
            elif chance.random() < 0.1:
                self._leave(chance.randrange(1, len(self._streams)))
            elif chance.random() < 0.1:
                self._remap()
            else:
                self._work(chance.choice(self._works), number, chance.choice(self._streams))()
        ok(driver.cuCtxSynchronize())
        seen = self._graph_block, *chance.choices(self._buffers, k=3)
        return b"".join(self._part(buffer) for buffer in seen)

    def close(self) -> None:
        """Free everything."""
        ok(driver.cuCtxSynchronize())
        self._graph.close()
        for buffer in (*self._buffers, self._graph_block):
            self._free(buffer, self._streams[0])
        for stream in self._streams[1:]:
            ok(driver.cuStreamDestroy(stream))

    # --- order

    def _work(self, kind: Any, number: int, stream: Any, *taken: Buffer) -> Callable[[], None]:
        """Work of this kind on this stream: drawn now, done when it is called."""
        self._taken = list(taken)
        do = kind(stream, number)
        buffers = self._taken[len(taken) :]

        def done() -> None:
            for buffer in buffers:
                ok(driver.cuStreamWaitEvent(stream, buffer.done, 0))
            do()
            for buffer in buffers:
                ok(driver.cuEventRecord(buffer.done, stream))

        return done

    def _two_threads(self, number: int) -> None:
        """Two threads work on different memory at the same time, on different streams."""
        first, second = self._chance.sample(self._streams[1:] * 2, 2)
        ours = self._work(self._touch, number, first)
        theirs = self._work(self._by_value, number, second, *self._taken)
        self._other.together(theirs, ours)

    def _take(self) -> Buffer:
        """A buffer that this work has not taken yet."""
        free = [b for b in self._buffers if not any(b is taken for taken in self._taken)]
        self._taken.append(self._chance.choice(free))
        return self._taken[-1]

    def _leave(self, which: int) -> None:
        """Destroy a stream, whatever it is at, and use another."""
        ok(driver.cuStreamDestroy(self._streams[which]))
        self._streams[which] = ok(driver.cuStreamCreate(NON_BLOCKING))

    # --- memory

    def _allocate(self, kind: str = "") -> Buffer:
        chance = self._chance
        kind = kind or chance.choice(("plain", "plain", "pool", "mapped"))
        size = CHUNK if kind == "mapped" else chance.choice(SIZES)
        if kind == "plain":
            address = int(ok(driver.cuMemAlloc(size)))
        elif kind == "pool":
            address = int(ok(driver.cuMemAllocAsync(size, 0)))
            ok(driver.cuStreamSynchronize(0))
        else:
            address = int(ok(driver.cuMemAddressReserve(size, 0, 0, 0)))
            handle = ok(driver.cuMemCreate(size, properties(), 0))
            map_memory(handle, address)
            ok(driver.cuMemRelease(handle))
        done = ok(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        write(address, chance.randbytes(size))
        return Buffer(kind, address, size, done)

    def _free(self, buffer: Buffer, stream: Any) -> None:
        if buffer.kind == "plain":
            ok(driver.cuMemFree(buffer.address))
        elif buffer.kind == "pool":
            ok(driver.cuStreamWaitEvent(stream, buffer.done, 0))
            ok(driver.cuMemFreeAsync(buffer.address, stream))
        else:
            ok(driver.cuEventSynchronize(buffer.done))
            ok(driver.cuMemUnmap(buffer.address, buffer.size))
            ok(driver.cuMemAddressFree(buffer.address, buffer.size))
        ok(driver.cuEventDestroy(buffer.done))

    def _replace(self, old: Buffer) -> None:
        self._free(old, self._chance.choice(self._streams))
        new = self._allocate()
        self._buffers = [new if buffer is old else buffer for buffer in self._buffers]

    def _remap(self) -> None:
        """Give the addresses of a mapped buffer other memory."""
        mapped = [buffer for buffer in self._buffers if buffer.kind == "mapped"]
        if not mapped:
            return
        buffer = self._chance.choice(mapped)
        ok(driver.cuEventSynchronize(buffer.done))
        ok(driver.cuMemUnmap(buffer.address, buffer.size))
        handle = ok(driver.cuMemCreate(buffer.size, properties(), 0))
        map_memory(handle, buffer.address)
        ok(driver.cuMemRelease(handle))
        write(buffer.address, self._chance.randbytes(buffer.size))

    def _part(self, buffer: Buffer) -> bytes:
        return read(buffer.address + self._chance.randrange(buffer.size - 64), 64)

    def _span(self, buffer: Buffer, most: int, unit: int = 1) -> tuple[int, int]:
        """An address in the buffer and a number of bytes from there, multiples of ``unit``."""
        size = self._chance.randrange(unit, min(most, buffer.size // 2), unit)
        return buffer.address + self._chance.randrange(0, buffer.size - size, unit), size

    # --- work

    def _launch(self, name: str, *arguments: Any, threads: int, stream: Any) -> Callable[[], None]:
        return lambda: self._kernels.launch(name, *arguments, threads=threads, stream=stream)

    def _cells(self) -> tuple[int, int, int]:
        """Words all over a buffer: the address of the first, how many, how far apart."""
        buffer = self._take()
        count = self._chance.randrange(1, 100)
        return buffer.address, count, buffer.words // count

    def _touch(self, stream: Any, number: int) -> Callable[[], object]:
        address, count, stride = self._cells()
        arguments = u64(address), u32(count), u32(stride), u64(number)
        return self._launch("touch", *arguments, threads=count, stream=stream)

    def _by_value(self, stream: Any, number: int) -> Callable[[], object]:
        address, count, stride = self._cells()
        cells = Cells(address, count, stride)
        return self._launch("by_value", cells, u64(number), threads=count, stream=stream)

    def _blend(self, stream: Any, number: int) -> Callable[[], object]:
        to, source = self._take(), self._take()
        count = min(to.words, source.words, 2000)
        arguments = u64(to.address), u64(source.address), u32(count), u64(number)
        return self._launch("blend", *arguments, threads=128, stream=stream)

    def _scatter(self, stream: Any, number: int) -> Callable[[], object]:
        to, source = self._take(), self._take()
        arguments = u64(to.address), u64(source.address), u32(50), u32(to.words), u64(number)
        return self._launch("scatter", *arguments, threads=50, stream=stream)

    def _hide(self, stream: Any, number: int) -> Callable[[], object]:
        address, count, stride = self._cells()
        arguments = u64(~address & (1 << 64) - 1), u32(count), u32(stride), u64(number)
        return self._launch("masked", *arguments, threads=count, stream=stream)

    def _copy(self, stream: Any, _: int) -> Callable[[], object]:
        to, size = self._span(self._take(), 1 << 20)
        source = self._take()
        size = min(size, source.size)
        return lambda: ok(driver.cuMemcpyDtoDAsync(to, source.address, size, stream))

    def _send(self, stream: Any, _: int) -> Callable[[], object]:
        to, size = self._span(self._take(), 65536)
        data = self._chance.randbytes(size)
        return lambda: ok(driver.cuMemcpyHtoDAsync(to, data, size, stream))

    def _fill(self, stream: Any, number: int) -> Callable[[], object]:
        to, size = self._span(self._take(), 1 << 20, 4)
        return lambda: ok(driver.cuMemsetD32Async(to, number, size // 4, stream))

    def _fill_rows(self, stream: Any, number: int) -> Callable[[], object]:
        buffer = self._take()
        pitch = self._chance.randrange(64, 400)
        rows = min(200, buffer.size // pitch)
        return lambda: ok(
            driver.cuMemsetD2D8Async(buffer.address, pitch, number % 256, 48, rows, stream)
        )

    def _set(self, stream: Any, number: int) -> Callable[[], object]:
        to, _ = self._span(self._take(), 64, 8)
        return lambda: ok(driver.cuStreamWriteValue64(stream, to, number, 0))

    def _run_graph(self, stream: Any, number: int) -> Callable[[], object]:
        if any(taken is self._graph_block for taken in self._taken):
            return lambda: None
        self._taken.append(self._graph_block)
        if self._chance.random() < 0.5:
            self._graph.aim(self._graph_block.address, number, number)
        return lambda: self._graph.launch(stream)


def main() -> None:
    report = Report()
    kernels = Kernels()
    other = Other(kernels)
    number = int(sys.argv[2])
    program: Program | None = None
    for step in report.steps():
        if program is not None and Path(f"end-{number}").exists():
            program.close()
            program, number = None, number + 1
        if program is None:
            print(f"program {number}{' hides' * hides(number)}", flush=True)
            program = Program(kernels, other, number)
        report.tell(step, program.step(step))


if __name__ == "__main__":
    main()
