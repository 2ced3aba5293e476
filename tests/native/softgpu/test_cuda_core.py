"""Programs in cuda.core and through modules: kernels compiled by NVRTC."""

from pathlib import Path

from tests.native.softgpu import program

COMPILE = """
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
def compile(source, *names):
    program = Program(source, "c++", ProgramOptions(arch="sm_90"))
    return program.compile("ptx", name_expressions=names)
"""


def test_a_kernel_through_cuda_core(tmp_path: Path) -> None:
    program.run(
        COMPILE
        + """
device = Device(); device.set_current(); stream = device.create_stream()
assert device.name == "PHOS software GPU"
source = '''template <typename T> __global__ void axpy(T a, const T* x, T* y, size_t n) {
    size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i]; }'''
kernel = compile(source, "axpy<float>", "axpy<double>")
n = 1000
for name, kind in (("axpy<float>", np.float32), ("axpy<double>", np.float64)):
    x, y = np.arange(n, dtype=kind), np.ones(n, kind)
    dx, dy = device.allocate(x.nbytes, stream=stream), device.allocate(y.nbytes, stream=stream)
    ck(d.cuMemcpyHtoD(int(dx.handle), x.ctypes.data, x.nbytes))
    ck(d.cuMemcpyHtoD(int(dy.handle), y.ctypes.data, y.nbytes))
    launch(stream, LaunchConfig(grid=4, block=256), kernel.get_kernel(name), kind(3),
           int(dx.handle), int(dy.handle), np.uint64(n))
    stream.sync()
    out = np.zeros(n, kind); ck(d.cuMemcpyDtoH(out.ctypes.data, int(dy.handle), out.nbytes))
    assert (out == 3 * x + 1).all()
""",
        tmp_path,
    )


def test_modules_globals_and_argument_layout(tmp_path: Path) -> None:
    program.run(
        COMPILE
        + """
context = use()
source = '''__device__ int total; extern "C" __global__ void add(char a, double b, int c) {
    atomicAdd(&total, a + (int)b + c); }'''
ptx = compile(source).code
module = ck(d.cuModuleLoadData(ptx)); f = ck(d.cuModuleGetFunction(module, b"add"))
assert [ck(d.cuFuncGetParamInfo(f, i)) for i in range(3)] == [(0, 1), (8, 8), (16, 4)]
assert code(d.cuFuncGetParamInfo(f, 3)) == "ERROR_INVALID_VALUE"
address, size = ck(d.cuModuleGetGlobal(module, b"total")); assert size == 4
arguments = ((1, 2.0, 3), (ctypes.c_char, ctypes.c_double, ctypes.c_int))
ck(d.cuLaunchKernel(f, 2, 1, 1, 32, 1, 1, 0, 0, arguments, 0)); ck(d.cuCtxSynchronize())
assert fetch(address, 1)[0] == 64 * 6
refused = d.cuLaunchKernel(f, 1, 1, 1, 2048, 1, 1, 0, 0, arguments, 0)
assert code(refused) == "ERROR_INVALID_VALUE"
assert code(d.cuModuleGetFunction(module, b"none")) == "ERROR_NOT_FOUND"
library = ck(d.cuLibraryLoadData(ptx, None, None, 0, None, None, 0))
kernel = ck(d.cuLibraryGetKernel(library, b"add"))
assert ck(d.cuKernelGetParamInfo(kernel, 1)) == (8, 8)
ck(d.cuLaunchKernel(d.CUfunction(int(kernel)), 1, 1, 1, 32, 1, 1, 0, 0, arguments, 0))
ck(d.cuCtxSynchronize())
assert fetch(ck(d.cuLibraryGetGlobal(library, b"total"))[0], 1)[0] == 32 * 6
ck(d.cuLibraryUnload(library)); ck(d.cuModuleUnload(module))
""",
        tmp_path,
    )


def test_machine_code_is_refused_with_the_reason(tmp_path: Path) -> None:
    log = tmp_path / "log"
    out = program.run(
        "use(); print(code(d.cuModuleLoadData(b'\\x7fELF' + bytes(100))),"
        " code(d.cuModuleLoadData(b'this is no PTX')))",
        tmp_path,
        PHOS_SOFTGPU_LOG=str(log),
    )
    assert out == "ERROR_NO_BINARY_FOR_GPU ERROR_INVALID_PTX\n"
    assert "runs PTX only" in log.read_text()


def test_a_stray_kernel_breaks_its_context(tmp_path: Path) -> None:
    program.run(
        COMPILE
        + """
context = use()
module = ck(d.cuModuleLoadData(compile('extern "C" __global__ void poke(int* p) { *p = 1; }').code))
f = ck(d.cuModuleGetFunction(module, b"poke"))
ck(d.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, ((0x6f1000000000,), (ctypes.c_void_p,)), 0))
for call in (lambda: d.cuCtxSynchronize(), lambda: d.cuMemAlloc(4), lambda: d.cuStreamCreate(0)):
    assert d.CUresult(call()[0]).name == "CUDA_ERROR_ILLEGAL_ADDRESS"
""",
        tmp_path,
    )
