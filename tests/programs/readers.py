"""A kernel that reads blocks which nobody writes any more, and writes a part of another."""

import hashlib
from ctypes import c_uint32 as u32
from ctypes import c_uint64 as u64
from pathlib import Path

import numpy as np
from cuda.bindings import driver
from gpu import Device, Report, allocate, compile_ptx, ok, read, write

BLOCK = 4 << 20
BLOCKS = 12
COUNT = 4096


def main() -> None:
    report = Report()
    Device()
    module = ok(driver.cuModuleLoadData(compile_ptx(Path(__file__).with_name("readers.cu"))))
    gather = ok(driver.cuModuleGetFunction(module, b"gather"))
    blocks = [allocate(BLOCK) for _ in range(BLOCKS)]
    for number, block in enumerate(blocks):
        content = np.random.default_rng(number).integers(0, 1 << 32, BLOCK // 4, np.uint32)
        write(block, content.tobytes())
    out = allocate(BLOCK)
    for step in report.steps():
        chosen = [blocks[(4 * step + number) % BLOCKS] for number in range(4)]
        values = (*chosen, out, COUNT), (*[u64] * 5, u32)
        ok(driver.cuLaunchKernel(gather, COUNT // 128, 1, 1, 128, 1, 1, 0, 0, values, 0))
        ok(driver.cuCtxSynchronize())
        report.tell(step, hashlib.blake2b(read(out, 4 * COUNT), digest_size=8).digest())


if __name__ == "__main__":
    main()
