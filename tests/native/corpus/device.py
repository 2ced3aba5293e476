"""Runs the corpus on whatever libcuda this process finds."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from cuda.bindings import driver as cu
from cuda.bindings import nvrtc

from tests.native.corpus.case import Array, Case


def check(result: tuple[Any, ...]) -> Any:
    """The value of a call, or RuntimeError with the error's name."""
    if int(result[0]) != 0:
        raise RuntimeError(str(result[0]))
    return result[1] if len(result) == 2 else result[1:]


@cache
def _includes() -> tuple[str, ...]:
    from cuda.pathfinder import find_nvidia_header_directory

    found = find_nvidia_header_directory("cudart")
    return (found,) if found else ()


def compile_ptx(source: str, arch: str) -> bytes:
    program = check(nvrtc.nvrtcCreateProgram(source.encode(), b"corpus.cu", 0, [], []))
    options = [f"--gpu-architecture={arch}", "--device-int128"]
    options += [f"-I{folder}" for folder in _includes()]
    outcome = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    if int(outcome[0]) != 0:
        log = b" " * check(nvrtc.nvrtcGetProgramLogSize(program))
        check(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(log.decode())
    ptx: bytes = b" " * int(check(nvrtc.nvrtcGetPTXSize(program)))
    check(nvrtc.nvrtcGetPTX(program, ptx))
    check(nvrtc.nvrtcDestroyProgram(program))
    return ptx


def _load(ptx: bytes) -> Any:
    log = bytearray(4096)
    option = cu.CUjit_option
    result = cu.cuModuleLoadDataEx(
        ptx,
        2,
        [
            option.CU_JIT_ERROR_LOG_BUFFER,
            option.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
        ],
        [log, len(log)],
    )
    if int(result[0]) != 0:
        raise RuntimeError(f"{result[0]!s}: {log.split(bytes(1))[0].decode()}")
    return result[1]


class Device:
    def __init__(self) -> None:
        check(cu.cuInit(0))
        self.device = check(cu.cuDeviceGet(0))
        self.context = check(cu.cuDevicePrimaryCtxRetain(self.device))
        check(cu.cuCtxSetCurrent(self.context))

    @property
    def name(self) -> str:
        text: bytes = check(cu.cuDeviceGetName(256, self.device))
        return text.split(b"\0")[0].decode()

    def capability(self) -> int:
        attribute = cu.CUdevice_attribute
        major = check(
            cu.cuDeviceGetAttribute(
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self.device
            )
        )
        minor = check(
            cu.cuDeviceGetAttribute(
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self.device
            )
        )
        return int(major) * 10 + int(minor)

    def run(self, case: Case) -> list[Array]:
        """The outputs of `case`; RuntimeError when a call fails."""
        module = _load(compile_ptx(case.source, case.arch))
        function = check(cu.cuModuleGetFunction(module, b"k"))
        arrays = [np.ascontiguousarray(array) for array in case.inputs]
        arrays += [np.zeros(count, dtype) for dtype, count in case.outputs]
        addresses = []
        for array in arrays:
            address = check(cu.cuMemAlloc(max(array.nbytes, 1)))
            check(cu.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
            addresses.append(address)
        values: list[Any] = [np.array(int(address), np.uint64) for address in addresses]
        values += [np.array(scalar) for scalar in case.scalars]
        pointers = np.array([value.ctypes.data for value in values], np.uint64)
        launch = cu.cuLaunchCooperativeKernel if case.cooperative else cu.cuLaunchKernel
        arguments = (function, *case.grid, *case.block, case.shared, 0, pointers.ctypes.data)
        check(launch(*arguments) if case.cooperative else launch(*arguments, 0))
        check(cu.cuCtxSynchronize())
        outputs = arrays[len(case.inputs) :]
        for array, address in zip(outputs, addresses[len(case.inputs) :], strict=True):
            check(cu.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
        for address in addresses:
            check(cu.cuMemFree(address))
        check(cu.cuModuleUnload(module))
        return outputs
