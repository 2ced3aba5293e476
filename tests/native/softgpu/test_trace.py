"""The access trace: what every operation read and wrote, in which order, by whom."""

import json
import time
from pathlib import Path
from typing import Any

from tests.native.softgpu import program

COPY = """
from cuda.core import Program, ProgramOptions
source = '''extern "C" __global__ void copy(int* to, const int* from) {
    if (threadIdx.x < 10 || threadIdx.x > 20) to[threadIdx.x] = from[threadIdx.x]; }'''
def function():
    ptx = Program(source, "c++", ProgramOptions(arch="sm_90")).compile("ptx").code
    return ck(d.cuModuleGetFunction(ck(d.cuModuleLoadData(ptx)), b"copy"))
def run(f, to, source, stream=0):
    ck(d.cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, stream,
                        ((to, source), (ctypes.c_void_p, ctypes.c_void_p)), 0))
"""


def traced(code: str, folder: Path) -> tuple[list[int], list[dict[str, Any]]]:
    """The numbers that a program printed, and the lines of its trace."""
    out = program.run(COPY + code, folder, PHOS_SOFTGPU_TRACE=str(folder / "trace"))
    lines = (folder / "trace").read_text().splitlines()
    return [int(word) for word in out.split()], [json.loads(line) for line in lines]


def test_a_kernels_line_has_exactly_what_it_touched(tmp_path: Path) -> None:
    before = time.monotonic_ns()
    (p, q, stream, pid), (line,) = traced(
        """
use(); p, q = (int(ck(d.cuMemAlloc(4096))) for _ in range(2)); s = ck(d.cuStreamCreate(1))
run(function(), p, q, s); ck(d.cuCtxSynchronize())
print(p, q, ck(d.cuStreamGetId(s)), os.getpid())
""",
        tmp_path,
    )
    assert before < line.pop("start") < line.pop("end") < time.monotonic_ns()
    assert line == {
        "kind": "kernel",
        "kernel": "copy",
        "read": [[q, q + 40], [q + 84, q + 128]],
        "written": [[p, p + 40], [p + 84, p + 128]],
        "pid": pid,
        "stream": stream,
    }


def test_copies_and_fills_have_lines_as_kernels_do(tmp_path: Path) -> None:
    """In their order, rows one by one, and also as nodes of a graph; pageable host memory is not
    the devices' and has none."""
    (p, q, pinned), lines = traced(
        """
use(); p, q = (int(ck(d.cuMemAlloc(4096))) for _ in range(2)); s = ck(d.cuStreamCreate(1))
pinned, own, f = int(ck(d.cuMemAllocHost(4096))), np.zeros(16, np.uint8), function()
ck(d.cuMemsetD32Async(p, 1, 8, s)); ck(d.cuMemsetD2D8Async(p, 64, 1, 16, 3, s))
ck(d.cuMemcpyDtoDAsync(q + 8, p, 24, s)); ck(d.cuMemcpyHtoDAsync(p, own.ctypes.data, 16, s))
ck(d.cuMemcpyDtoHAsync(pinned, q, 100, s)); ck(d.cuStreamWriteValue64(s, p + 8, 1, 0))
ck(d.cuStreamBeginCapture(s, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
ck(d.cuMemsetD8Async(p, 1, 5, s)); run(f, p, q, s)
graph = ck(d.cuGraphInstantiate(ck(d.cuStreamEndCapture(s)), 0))
for _ in range(2): ck(d.cuGraphLaunch(graph, s))
ck(d.cuStreamSynchronize(s)); print(p, q, pinned)
""",
        tmp_path,
    )
    seen = [(line["kind"], line["read"], line["written"]) for line in lines]
    kernel = ("kernel", [[q, q + 40], [q + 84, q + 128]], [[p, p + 40], [p + 84, p + 128]])
    assert seen == [
        ("fill", [], [[p, p + 32]]),
        ("fill", [], [[p, p + 16], [p + 64, p + 80], [p + 128, p + 144]]),
        ("copy", [[p, p + 24]], [[q + 8, q + 32]]),
        ("copy", [], [[p, p + 16]]),
        ("copy", [[q, q + 100]], [[pinned, pinned + 100]]),
        ("write", [], [[p + 8, p + 16]]),
        *[("fill", [], [[p, p + 5]]), kernel] * 2,
    ]
    times = [time for line in lines for time in (line["start"], line["end"])]
    assert times == sorted(times)
