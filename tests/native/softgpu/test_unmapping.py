"""Memory taken away while it is used: an error of the kernel or the copy, not the process's end."""

from pathlib import Path

from tests.native.softgpu import program

PREPARE = """
from cuda.core import Program, ProgramOptions
use(); s = ck(d.cuStreamCreate(1)); SIZE = 4 << 20
source = '''extern "C" __global__ void stir(volatile unsigned* p, unsigned n) {
    for (unsigned i = threadIdx.x;; i = (i + blockDim.x) % n) p[i] = p[i] + 1; }'''
ptx = Program(source, "c++", ProgramOptions(arch="sm_90")).compile("ptx").code
def stir(p):
    function = ck(d.cuModuleGetFunction(ck(d.cuModuleLoadData(ptx)), b"stir"))
    ck(d.cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, s,
                        ((p, SIZE // 4), (ctypes.c_void_p, ctypes.c_uint)), 0))
    while ctypes.c_uint32.from_address(p).value == 0: time.sleep(0.001)     # it runs
def broken():
    assert code(d.cuCtxSynchronize()) == "ERROR_ILLEGAL_ADDRESS"
    ck(d.cuDevicePrimaryCtxReset(0)); use()
    return ck(d.cuStreamCreate(1))
"""


def test_memory_goes_while_a_kernel_writes_it(tmp_path: Path) -> None:
    program.run(
        PREPARE
        + """
for taken in (lambda va: ck(d.cuMemUnmap(va, SIZE)),
              lambda va: ck(d.cuMemSetAccess(va, SIZE, [access(0, "NONE")], 1)),
              lambda va: ck(d.cuMemSetAccess(va, SIZE, [access(0, "READ")], 1))):
    for _ in range(8):
        va = int(map_memory(ck(d.cuMemCreate(SIZE, properties(), 0)), SIZE))
        ck(d.cuMemsetD8(va, 0, SIZE)); ck(d.cuCtxSynchronize())
        stir(va); taken(va); s = broken()
""",
        tmp_path,
    )


def test_memory_goes_while_it_is_copied(tmp_path: Path) -> None:
    program.run(
        """
use(); s = ck(d.cuStreamCreate(1)); SIZE = 32 << 20
for round in range(6):
    va = int(map_memory(ck(d.cuMemCreate(SIZE, properties(), 0)), SIZE))
    p = int(ck(d.cuMemAlloc(SIZE)))
    c = d.CUDA_MEMCPY2D(); c.srcMemoryType = c.dstMemoryType = d.CUmemorytype(2)
    c.srcDevice, c.dstDevice, c.srcPitch, c.dstPitch = va, p, 4096, 4096
    c.WidthInBytes, c.Height = 4096, SIZE // 4096
    for _ in range(400): ck(d.cuMemcpy2DAsync(c, s))  # none comes after the error
    time.sleep(0.002 * round); ck(d.cuMemUnmap(va, SIZE))
    assert code(d.cuCtxSynchronize()) == "ERROR_ILLEGAL_ADDRESS"
    ck(d.cuDevicePrimaryCtxReset(0)); use(); s = ck(d.cuStreamCreate(1))
""",
        tmp_path,
    )
