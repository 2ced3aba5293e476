"""Compare what the analysis says of kernels with what the software GPU saw them do.

The same PTX runs on the software GPU and is compiled to the machine code that is analysed.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phosd.engine.analysis.code import cubin
from phosd.engine.analysis.code.disassembly import disassemble
from phosd.engine.analysis.code.opcodes import Use
from phosd.engine.analysis.code.tools import Tool, run
from phosd.engine.analysis.provenance import origin
from phosd.engine.analysis.reference.evaluation import Evaluation, Launch
from phosd.engine.analysis.reference.ranges import spans
from phosd.engine.analysis.summary import Summary, of_code
from phosd.engine.analysis.thread.followed import Followed
from tests.native.analysis.generator import ARRAY_BYTES, HEADER, Kernel
from tests.native.corpus.device import compile_ptx
from tests.native.softgpu import program

Ranges = list[tuple[int, int]]

PARAMETERS = """
import json, struct

def parameters(launch, array_bytes, arrays):
    '''The bytes of a kernel's parameters, a copy in memory and where each begins in it.'''
    at = [arrays[array] + array_bytes // 2 + by for array, by in launch["places"]]
    numbers = [launch["numbers"][one] for one in "nsmqeh"]
    fields = struct.pack("<4Q q Q i4x 3i4x q b1x h", *at[:4], 5, at[4], 3, *numbers)
    buffer = np.frombuffer(fields, np.uint8).copy()
    offsets = (0, 8, 16, 24, 32, 56, 60, 64, 72, 80, 82)
    return fields, buffer, np.array([buffer.ctypes.data + each for each in offsets], np.uint64)
"""
"""Code of programs that launch kernels of the generator."""
RUN = (
    PARAMETERS
    + """
setup = json.loads(sys.argv[1])
use()
module = ck(d.cuModuleLoadData(open(setup["ptx"], "rb").read()))
arrays = [int(ck(d.cuMemAlloc(setup["bytes"]))) for _ in range(5)]
initial = np.random.default_rng(0).integers(0, 1 << 30, (5, setup["bytes"] // 4), np.uint32)
for launch in setup["launches"]:
    for address, content in zip(arrays, initial):
        ck(d.cuMemcpyHtoD(address, content.ctypes.data, setup["bytes"]))
    function = ck(d.cuModuleGetFunction(module, launch["name"].encode()))
    fields, buffer, pointers = parameters(launch, setup["bytes"], arrays)
    left = []
    for again in range(2):
        shape = *launch["grid"], *launch["block"]
        ck(d.cuLaunchKernel(function, *shape, 0, 0, pointers.ctypes.data, 0))
        ck(d.cuCtxSynchronize())
        left.append([fetch(address, setup["bytes"] // 4) for address in arrays])
    same = all(map(np.array_equal, *left))
    print(json.dumps([fields.hex(), arrays, same]), flush=True)
"""
)


@dataclass
class Seen:
    """A launch, what it read and wrote, and whether the memory was the same after another."""

    kernel: Kernel
    launch: Launch
    arrays: list[int]
    same: bool
    read: Ranges
    written: Ranges

    def extents(self) -> list[tuple[int, int]]:
        """Return where the arrays are."""
        return [(begin, begin + ARRAY_BYTES) for begin in self.arrays]

    def allocated(self, address: int) -> tuple[int, int] | None:
        """Return the array around an address."""
        return next((one for one in self.extents() if one[0] <= address < one[1]), None)


@dataclass
class Outcome:
    """What was wrong, and how many accesses had a range, or an origin only, or neither. With
    ``sunk``, the machine code reads less than its PTX says.
    """

    wrong: list[str]
    sunk: bool = False
    ranges: int = 0
    origins: int = 0
    unknown: int = 0


def machine_code(source: str, architecture: str = "sm_90") -> tuple[bytes, bytes]:
    """Return the PTX of CUDA C, and the cubin that ptxas makes of it."""
    ptx = compile_ptx(source, "compute_90").split(b"\0")[0]
    return ptx, run(Tool.PTXAS, ["--gpu-name", architecture], ptx)


def compiled(kernels: list[Kernel]) -> tuple[bytes, dict[str, Summary]]:
    """Return the kernels' PTX, and what was found in their machine code."""
    source = HEADER + "".join(kernel.source for kernel in kernels)
    ptx, image = machine_code(source)
    return ptx, analysed(image)


def analysed(image: bytes) -> dict[str, Summary]:
    """Return what was found in each kernel of a cubin."""
    found: dict[str, Summary] = {}
    known = cubin.read(image)
    for function in disassemble(image).functions:
        if function.name in known:
            found[function.name] = of_code(known[function.name], function.code)
    return found


def observed(kernels: list[Kernel], ptx: bytes, folder: Path) -> list[Seen]:
    """Run the kernels on the software GPU, and return what each did."""
    (folder / "kernels.ptx").write_bytes(ptx)
    trace = folder / "trace"
    setup = {
        "ptx": str(folder / "kernels.ptx"),
        "bytes": ARRAY_BYTES,
        "launches": [
            {
                "name": k.name,
                "numbers": k.numbers,
                "block": k.block,
                "grid": k.grid,
                "places": k.places,
            }
            for k in kernels
        ],
    }
    code = f"sys.argv[1:] = [{json.dumps(json.dumps(setup))}]\n" + RUN
    out = program.run(code, folder, PHOS_SOFTGPU_TRACE=str(trace))
    launches = [json.loads(line) for line in out.splitlines()]
    lines: list[dict[str, Any]] = [json.loads(line) for line in trace.read_text().splitlines()]
    traced = [line for line in lines if line["kind"] == "kernel"][::2]
    assert len(traced) == len(launches) == len(kernels)
    return [
        Seen(
            kernel,
            Launch(bytes.fromhex(fields), kernel.block, kernel.grid),
            arrays,
            same,
            [(begin, end) for begin, end in line["read"]],
            [(begin, end) for begin, end in line["written"]],
        )
        for kernel, (fields, arrays, same), line in zip(kernels, launches, traced, strict=True)
    ]


def compare(followed: Followed, seen: Seen) -> Outcome:
    """Return what the kernel did that was not predicted."""
    outcome = Outcome([])
    ranges: dict[str, Ranges] = {"read": [], "written": []}
    everywhere = set()
    for access in followed.accesses:
        uses = [use for use in ("read", "written") if access.use in (Use(use), Use.BOTH)]
        where = spans(followed, access, seen.launch)
        if where is not None:
            outcome.ranges += 1
            found = [(one.begin, one.end) for one in where]
        else:
            came = origin(followed, access, Evaluation(followed, access.facts, seen.launch).places)
            if came.unknown or came.anywhere:
                outcome.unknown += 1
                everywhere |= set(uses)
                continue
            outcome.origins += 1
            found = [_block(seen, at) for at in came.parameters]
        for use in uses:
            ranges[use] += found
    for use, real in (("read", seen.read), ("written", seen.written)):
        if use not in everywhere:
            known = ranges[use]
            if use == "read":  # ptxas loads nothing that the thread has just stored
                known = known + seen.written
            missed = [one for one in real if not _covered(one, _merged(known))]
            if missed and use == "read":
                known = _merged(known + sunk(followed, seen))
                missed = [one for one in missed if not _covered(one, known)]
                missed = [one for one in missed if not is_dropped(followed, *one)]
                outcome.sunk = not missed
            if missed:
                outcome.wrong.append(f"{seen.kernel.name} {use} {missed}, of {ranges[use]}")
    return outcome


def sunk(followed: Followed, seen: Seen) -> Ranges:
    """Return what the loads of the machine code would read if all threads came to them: ptxas moves
    a load to where its result is used, past the condition for that.
    """
    found: Ranges = []
    for access in followed.accesses:
        if access.use is Use.READ:
            where = spans(followed, replace(access, facts=frozenset()), seen.launch)
            found += [(one.begin, one.end) for one in where or ()]
    return found


def is_dropped(followed: Followed, begin: int, end: int) -> bool:
    """Return whether no load of the machine code is as small as what was read there: ptxas drops a
    load whose result is not used.
    """
    loads = [access.size for access in followed.accesses if access.use is Use.READ]
    return end - begin < min(loads, default=end - begin + 1)


def _block(seen: Seen, offset: int) -> tuple[int, int]:
    """Return the array that a parameter points into; none if it points into none."""
    (address,) = struct.unpack_from("<Q", seen.launch.parameters, offset)
    return seen.allocated(address) or (0, 0)


def _merged(ranges: Ranges) -> Ranges:
    found: Ranges = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _covered(one: tuple[int, int], ranges: Ranges) -> bool:
    return any(begin <= one[0] and one[1] <= end for begin, end in ranges)
