"""Compile and launch kernels of one's own by the driver's API; for the programs beside this."""

from typing import Any

from cuda.bindings import driver, nvrtc


def ok(result: tuple[Any, ...]) -> Any:
    """Return the value of a call. Raises :class:`RuntimeError` when it failed."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA says {status!r}")
    return values[0] if values else None


def context() -> None:
    """Make the primary context of the first device current."""
    ok(driver.cuInit(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(ok(driver.cuDeviceGet(0))))))


def functions(source: bytes, *names: bytes) -> list[Any]:
    """Compile CUDA C++ by NVRTC and return its kernels of these names."""
    program = ok(nvrtc.nvrtcCreateProgram(source, b"program.cu", 0, [], []))
    ok(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_75"]))
    ptx = b" " * int(ok(nvrtc.nvrtcGetPTXSize(program)))
    ok(nvrtc.nvrtcGetPTX(program, ptx))
    module = ok(driver.cuModuleLoadData(ptx))
    return [ok(driver.cuModuleGetFunction(module, name)) for name in names]


def launch(kernel: Any, stream: Any, arguments: Any = 0) -> None:
    """Launch a kernel of one thread."""
    ok(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))
