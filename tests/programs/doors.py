"""Writes through every call that takes a destination: each has a block of its own, of which each
step writes another part.
"""

import ctypes
from collections.abc import Callable
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64
from typing import Any

from cuda.bindings import driver
from gpu import Report, ok, read
from launching import CHUNK, THREADS, Kernels, filled, pointers_to

PART = 8192
"""Bytes of a block that are a step's: rows of 512 of which copies and fills take the first 256."""
ROW, WIDTH, ROWS = 512, 256, 8
DEVICE, UNIFIED = (
    driver.CUmemorytype.CU_MEMORYTYPE_DEVICE,
    driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED,
)
WRITE_32 = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32

Door = Callable[[int, int], Any]
"""Calls the driver with a destination and a seed; gives its answer."""


class Doors:
    """All calls, by name. What they copy comes from one block that is never written."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._source = filled(CHUNK, 1)
        self._stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        pinned = int(ok(driver.cuMemHostAlloc(CHUNK, 0)))
        ctypes.memmove(pinned, read(self._source, CHUNK), CHUNK)
        self._pinned = pinned

    def all(self) -> dict[str, Door]:
        """A new block is to be given to each."""
        return {**self._copies(), **self._shaped(), **self._fills(), **self._others()}

    def _from(self, seed: int) -> int:
        return self._source + seed % (CHUNK - PART) // 64 * 64

    def _copies(self) -> dict[str, Door]:
        context, stream = self._kernels.context, self._stream
        at, pinned = self._from, self._pinned
        d = driver
        return {
            "HtoD": lambda to, s: d.cuMemcpyHtoD(to, s.to_bytes(8, "little") * 64, 512),
            "HtoDAsync": lambda to, s: d.cuMemcpyHtoDAsync(to, pinned + s % 4096, 512, stream),
            "DtoD": lambda to, s: d.cuMemcpyDtoD(to, at(s), PART),
            "DtoDAsync": lambda to, s: d.cuMemcpyDtoDAsync(to, at(s), PART, stream),
            "unified": lambda to, s: d.cuMemcpy(to, at(s), PART),
            "unified, from the host": lambda to, s: d.cuMemcpy(to, pinned + s % 4096, PART),
            "unified, async": lambda to, s: d.cuMemcpyAsync(to, at(s), PART, stream),
            "peer": lambda to, s: d.cuMemcpyPeer(to, context, at(s), context, PART),
            "peer, async": lambda to, s: d.cuMemcpyPeerAsync(
                to, context, at(s), context, PART, stream
            ),
            "batch": lambda to, s: d.cuMemcpyBatchAsync(
                *(addresses(to, to + 4096), addresses(at(s), at(s + 64)), [512, 256], 2),
                *([in_order()], [0], 1, stream),
            ),
        }

    def _shaped(self) -> dict[str, Door]:
        stream, at = self._stream, self._from
        flat, deep, peer = driver.CUDA_MEMCPY2D, driver.CUDA_MEMCPY3D, driver.CUDA_MEMCPY3D_PEER

        def shape(kind: Any, to: int, seed: int, memory: Any = DEVICE) -> Any:
            copy = kind()
            copy.srcMemoryType, copy.srcDevice, copy.srcPitch = memory, at(seed), WIDTH
            copy.dstMemoryType, copy.dstDevice, copy.dstPitch = memory, to, ROW
            copy.WidthInBytes, copy.Height = WIDTH, ROWS
            if kind is not flat:
                copy.srcHeight, copy.dstHeight, copy.Depth = ROWS, ROWS, 2
            if kind is peer:
                copy.srcContext = copy.dstContext = self._kernels.context
            return copy

        d = driver
        return {
            "2D": lambda to, s: d.cuMemcpy2D(shape(flat, to, s)),
            "2D, unified": lambda to, s: d.cuMemcpy2D(shape(flat, to, s, UNIFIED)),
            "2D, unaligned": lambda to, s: d.cuMemcpy2DUnaligned(shape(flat, to + 1, s)),
            "2D, async": lambda to, s: d.cuMemcpy2DAsync(shape(flat, to, s), stream),
            "3D": lambda to, s: d.cuMemcpy3D(shape(deep, to, s)),
            "3D, async": lambda to, s: d.cuMemcpy3DAsync(shape(deep, to, s), stream),
            "3D, peer": lambda to, s: d.cuMemcpy3DPeer(shape(peer, to, s)),
            "3D, peer, async": lambda to, s: d.cuMemcpy3DPeerAsync(shape(peer, to, s), stream),
            "3D, batch": lambda to, s: d.cuMemcpy3DBatchAsync(1, [box(at(s), to)], 0, stream),
        }

    def _fills(self) -> dict[str, Door]:
        doors: dict[str, Door] = {}
        for bits in (8, 16, 32):
            for rows in ("", "D2"):
                for late in ("", "Async"):
                    name = f"cuMemset{rows}D{bits}{late}"
                    where = (self._stream,) if late else ()
                    doors[name] = self._fill(getattr(driver, name), bits, bool(rows), where)
        return doors

    def _fill(self, call: Any, bits: int, rows: bool, where: tuple[Any, ...]) -> Door:
        def door(to: int, seed: int) -> Any:
            value = seed % (1 << bits)
            if rows:
                return call(to, ROW, value, WIDTH * 8 // bits, ROWS, *where)
            return call(to, value, 512 * 8 // bits, *where)

        return door

    def _others(self) -> dict[str, Door]:
        d, stream = driver, self._stream
        return {
            "value of 32 bits": lambda to, s: d.cuStreamWriteValue32(stream, to, s % (1 << 32), 0),
            "value of 64 bits": lambda to, s: d.cuStreamWriteValue64(stream, to, s, 0),
            "values": lambda to, s: d.cuStreamBatchMemOp(stream, 1, [value(to, s % (1 << 32))], 0),
            "launch": lambda to, s: self._launch("cuLaunchKernel", to, s),
            "cooperative": lambda to, s: self._launch("cuLaunchCooperativeKernel", to, s),
            "launch, extended": self._launch_extended,
        }

    def _arguments(self, to: int, seed: int) -> Any:
        return u64(to), u32(THREADS), u32(8), u64(seed)

    def _launch(self, name: str, to: int, seed: int) -> Any:
        arguments = self._arguments(to, seed)
        pointers = pointers_to(arguments)
        call = self._kernels.function("touch"), 1, 1, 1, THREADS, 1, 1, 0, self._stream
        last = (0,) if name == "cuLaunchKernel" else ()
        return getattr(driver, name)(*call, ctypes.addressof(pointers), *last)

    def _launch_extended(self, to: int, seed: int) -> Any:
        arguments = self._arguments(to, seed)
        pointers = pointers_to(arguments)
        shape = driver.CUlaunchConfig()
        shape.gridDimX, shape.gridDimY, shape.gridDimZ = 1, 1, 1
        shape.blockDimX, shape.blockDimY, shape.blockDimZ = THREADS, 1, 1
        shape.hStream = self._stream
        function = self._kernels.function("touch")
        return driver.cuLaunchKernelEx(shape, function, ctypes.addressof(pointers), 0)


def addresses(*numbers: int) -> list[Any]:
    return [driver.CUdeviceptr(number) for number in numbers]


def in_order() -> Any:
    """The attributes of a copy that happens when the stream gets there."""
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return attributes


def box(source: int, to: int) -> Any:
    """A copy of rows within a batch."""

    def operand(address: int, row: int) -> Any:
        side = driver.CUmemcpy3DOperand()
        side.type = driver.CUmemcpy3DOperandType.CU_MEMCPY_OPERAND_TYPE_POINTER
        side.op.ptr.ptr, side.op.ptr.rowLength, side.op.ptr.layerHeight = address, row, ROWS
        return side

    copy = driver.CUDA_MEMCPY3D_BATCH_OP()
    copy.src, copy.dst = operand(source, WIDTH), operand(to, ROW)
    copy.extent.width, copy.extent.height, copy.extent.depth = WIDTH, ROWS, 1
    copy.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return copy


def value(address: int, number: int) -> Any:
    """An operation of a batch that writes 32 bits."""
    operation = driver.CUstreamBatchMemOpParams()
    operation.operation = WRITE_32
    operation.writeValue.operation = WRITE_32
    operation.writeValue.address = address
    operation.writeValue.value = number
    return operation


def main() -> None:
    report = Report()
    doors = Doors(Kernels()).all()
    blocks = {name: filled(CHUNK, 10 + i) for i, name in enumerate(doors)}
    for step in report.steps():
        place = step * PART % CHUNK
        seed = report.seed
        for name, door in doors.items():
            error, *_ = door(blocks[name] + place, seed)
            if int(error) != 0:
                raise RuntimeError(f"{name}: CUDA answered {error!r}")
        ok(driver.cuCtxSynchronize())
        report.tell(step, b"".join(read(block + place, 64) for block in blocks.values()))


if __name__ == "__main__":
    main()
