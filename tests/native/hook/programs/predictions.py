"""Makes calls whose writes are known, each after a line with its name in PHOS_TEST_PREDICTIONS."""

import ctypes
import json
import os
import struct
from collections.abc import Sequence
from ctypes import c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from cuda.bindings import driver

LOG = Path(os.environ["PHOS_TEST_PREDICTIONS"])
SIZE = 3 << 20
PTX = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry plain(.param .u64 a, .param .u32 n, .param .u64 b) { ret; }
.visible .entry packed(.param .align 8 .b8 s[48]) { ret; }
.visible .entry odd(.param .u32 n, .param .align 4 .b8 s[24]) { ret; }
.visible .entry mapped(.param .u64 a, .param .align 64 .b8 map[128]) { ret; }
.visible .entry only_second(.param .u64 a, .param .u64 b) { ret; }
.visible .entry only_none(.param .align 8 .b8 s[1024]) { ret; }
.visible .entry suspect(.param .u32 n) { ret; }
.visible .entry nothing() { ret; }
\0"""
OTHER = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry plain(.param .u32 n, .param .u64 a) { ret; }
\0"""
library = ctypes.CDLL("libcuda.so.1")
kept: list[Any] = []
"""What pointers lead to must outlive them."""


def ok(result: Any) -> Any:
    """The values of a driver call, which must have succeeded."""
    status, *values = (result,) if isinstance(result, int) else result
    assert int(status) == 0, status
    return values[0] if len(values) == 1 else values


def log(**what: object) -> None:
    with LOG.open("a") as file:
        file.write(json.dumps(what) + "\n")


def step(name: str) -> None:
    log(step=name)


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def parameters(values: Sequence[bytes]) -> Any:
    """``kernelParams``: pointers to the values."""
    buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
    array = (c_void_p * max(1, len(values)))(*(ctypes.addressof(b) for b in buffers))
    kept.extend(buffers)
    return array


def launch(
    function: Any, *values: bytes, name: str = "cuLaunchKernel", stream: Any = 0, extra: Any = None
) -> None:
    given = None if extra else parameters(values)
    last = [] if "Cooperative" in name else [extra]
    shape = [c_uint(1)] * 6 + [c_uint(0)]
    handle = c_void_p(int(function))
    ok(library[name](handle, *shape, c_void_p(int(stream)), given, *last))


def packed_in_a_buffer(data: bytes) -> Any:
    """``extra``: the parameters as they lie in the device's buffer."""
    buffer = ctypes.create_string_buffer(data, len(data))
    size = ctypes.c_size_t(len(data))
    extra = (c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
    kept.extend((buffer, size))
    return extra


def allocate() -> int:
    return int(ok(driver.cuMemAlloc(SIZE)))


ok(driver.cuInit(0))
ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
module = ok(driver.cuModuleLoadData(PTX))
kernel = {
    name: ok(driver.cuModuleGetFunction(module, name.encode()))
    for name in [
        "plain",
        "packed",
        "odd",
        "mapped",
        "only_second",
        "only_none",
        "suspect",
        "nothing",
    ]
}
stream = ok(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
step("preparations")
a, b, c = (allocate() for _ in range(3))
log(memory={"A": a, "B": b, "C": c})


def kernels() -> None:
    both = u64(a + 100), u32(7), u64(b)
    for variant in ("", "_ptsz"):
        step("parameters" + variant)
        launch(kernel["plain"], *both, name="cuLaunchKernel" + variant, stream=stream)
        step("cooperative" + variant)
        launch(kernel["plain"], *both, name="cuLaunchCooperativeKernel" + variant)
    step("extra")
    launch(kernel["plain"], extra=packed_in_a_buffer(u64(a, 7, b)))
    step("configured")
    config = driver.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream = stream
    values = (a, 7, b), (c_uint64, c_uint, c_uint64)
    ok(driver.cuLaunchKernelEx(config, kernel["plain"], values, 0))
    step("no parameters")
    launch(kernel["nothing"])
    step("no addresses")
    launch(kernel["plain"], u64(12), u32(7), u64(2**64 - 1))
    step("struct by value")
    launch(kernel["packed"], u64(a, 0, b + 1, 12, c + SIZE - 1, 1))
    step("struct at an odd offset")
    launch(kernel["odd"], u32(1), u32(2) + u64(b, c) + u32(3))
    step("tensor map")
    element = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8
    small, large = driver.cuuint32_t, driver.cuuint64_t
    shape, box, steps = [large(1024), large(16)], [small(64), small(4)], [small(1), small(1)]
    tensor = ok(
        driver.cuTensorMapEncodeTiled(
            element, 2, a + 4096, shape, [large(1024)], box, steps,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip
    launch(kernel["mapped"], u64(b), ctypes.string_at(int(tensor.getPtr()), 128))
    step("tensor map elsewhere")
    ok(driver.cuTensorMapReplaceAddress(tensor, c))
    launch(kernel["mapped"], u64(b), ctypes.string_at(int(tensor.getPtr()), 128))
    step("known to write through its second")
    launch(kernel["only_second"], u64(a), u64(b))
    step("beyond what is known of it")
    launch(kernel["only_none"], u64(*([a] * 64), *([b] * 64)))
    step("suspect")
    launch(kernel["suspect"], u32(1))
    step("freed")
    gone = allocate()
    ok(driver.cuMemFree(gone))
    launch(kernel["plain"], u64(gone), u32(1), u64(a))


def libraries() -> None:
    loaded = ok(driver.cuLibraryLoadData(PTX, [], [], 0, [], [], 0))
    found = ok(driver.cuLibraryGetKernel(loaded, b"plain"))
    step("kernel of a library")
    launch(found, u64(a), u32(1), u64(b))
    step("function of a library")
    launch(ok(driver.cuKernelGetFunction(found)), u64(a), u32(1), u64(b))
    # A handle can be given again, to a function of other parameters.
    for _ in range(20):
        image = ok(driver.cuModuleLoadData(PTX))
        function = ok(driver.cuModuleGetFunction(image, b"plain"))
        step("loaded")
        launch(function, u64(a), u32(1), u64(b))
        ok(driver.cuModuleUnload(image))
        image = ok(driver.cuModuleLoadData(OTHER))
        function = ok(driver.cuModuleGetFunction(image, b"plain"))
        step("loaded another")
        launch(function, u32(1), u64(c))
        ok(driver.cuModuleUnload(image))


def copies() -> None:
    host = ctypes.create_string_buffer(64)
    for variant in ("", "_ptds"):
        step("copy" + variant)
        ok(library["cuMemcpyHtoD_v2" + variant](c_uint64(a + 5), host, c_uint64(10)))
        step("fill" + variant)
        ok(library["cuMemsetD32_v2" + variant](c_uint64(b + 8), c_uint(1), c_uint64(10)))
    step("value")
    ok(driver.cuStreamWriteValue32(stream, c + 64, 1, 0))
    step("read")
    ok(driver.cuMemcpyDtoHAsync(host, a, 64, stream))


def captured(call: Any) -> Any:
    ok(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode(0)))
    call()
    return ok(driver.cuStreamEndCapture(stream))


def node_parameters(function: Any, values: Any) -> Any:
    node = driver.CUDA_KERNEL_NODE_PARAMS()
    node.func = function
    node.gridDimX = node.gridDimY = node.gridDimZ = 1
    node.blockDimX = node.blockDimY = node.blockDimZ = 1
    node.kernelParams = values
    return node


def fill_parameters(address: int, count: int) -> Any:
    node = driver.CUDA_MEMSET_NODE_PARAMS()
    node.dst, node.elementSize, node.width, node.height = address, 1, count, 1
    return node


def copy_parameters(address: int, count: int) -> Any:
    copy = driver.CUDA_MEMCPY3D()
    copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    copy.srcDevice, copy.dstDevice = c + (1 << 20), address
    copy.WidthInBytes, copy.Height, copy.Depth = count, 1, 1
    return copy


def graphs() -> None:
    context = ok(driver.cuCtxGetCurrent())
    one = (a, 7, 0), (c_uint64, c_uint, c_uint64)
    other = (b, 7, c), (c_uint64, c_uint, c_uint64)

    def run(name: str, executable: Any) -> None:
        step(name)
        ok(driver.cuGraphLaunch(executable, stream))

    step("captured")
    graph = captured(lambda: launch(kernel["plain"], u64(a), u32(1), u64(b), stream=stream))
    executable = ok(driver.cuGraphInstantiate(graph, 0))
    run("captured graph", executable)
    again = captured(lambda: launch(kernel["plain"], u64(c), u32(1), u64(0), stream=stream))
    ok(driver.cuGraphExecUpdate(executable, again))
    run("updated graph", executable)
    ok(driver.cuGraphExecDestroy(executable))

    built = ok(driver.cuGraphCreate(0))
    work = ok(driver.cuGraphAddKernelNode(built, [], 0, node_parameters(kernel["plain"], one)))
    fill = ok(driver.cuGraphAddMemsetNode(built, [], 0, fill_parameters(b + 10, 5), context))
    copy = ok(driver.cuGraphAddMemcpyNode(built, [], 0, copy_parameters(c + 20, 6), context))
    executable = ok(driver.cuGraphInstantiate(built, 0))
    run("built graph", executable)
    ok(
        driver.cuGraphExecKernelNodeSetParams(
            executable, work, node_parameters(kernel["plain"], other)
        )
    )
    run("another kernel", executable)
    ok(
        driver.cuGraphExecKernelNodeSetParams(
            executable, work, node_parameters(kernel["plain"], one)
        )
    )
    ok(driver.cuGraphExecMemsetNodeSetParams(executable, fill, fill_parameters(b, 1), context))
    ok(driver.cuGraphExecMemcpyNodeSetParams(executable, copy, copy_parameters(c, 2), context))
    run("another fill and copy", executable)

    outer = ok(driver.cuGraphCreate(0))
    child = ok(driver.cuGraphAddChildGraphNode(outer, [], 0, built))
    executable = ok(driver.cuGraphInstantiate(outer, 0))
    run("child graph", executable)
    held = ok(driver.cuGraphChildGraphNodeGetGraph(child))
    inner = ok(driver.cuGraphGetNodes(held, 3))[0][0]
    assert int(ok(driver.cuGraphNodeGetType(inner))) == 0
    library.cuGraphExecKernelNodeSetParams_v2.argtypes = [c_void_p] * 3
    changed = node_parameters(kernel["plain"], other)
    status = library.cuGraphExecKernelNodeSetParams_v2(
        int(executable), int(inner), int(changed.getPtr())
    )
    if status == 0:
        run("child graph changed within", executable)
    suspect = captured(lambda: launch(kernel["suspect"], u32(1), stream=stream))
    run("graph with a suspect", ok(driver.cuGraphInstantiate(suspect, 0)))
    second = captured(lambda: launch(kernel["only_second"], u64(a), u64(b), stream=stream))
    run("graph known to write through one", ok(driver.cuGraphInstantiate(second, 0)))


kernels()
libraries()
copies()
graphs()
