"""What the hook predicts of launches and graphs by a table: less than whole blocks, and all that
the software GPU then writes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phosd.engine.analysis import table
from phosd.engine.chunk_map.chunk_map import KernelRow
from phosd.engine.hook_client.code_images import hash_of
from tests.native.analysis import oracle
from tests.native.analysis.generator import ARRAY_BYTES, Kernel, kernel
from tests.native.hook.test_writes import Submission, common, merged, record, size
from tests.native.softgpu import program
from tests.support import rotation

KERNELS = 12

PROGRAM = (
    program.PRELUDE
    + oracle.PARAMETERS
    + """
setup = json.loads(sys.argv[1])
use()
module = ck(d.cuModuleLoadData(open(setup["ptx"], "rb").read() + bytes(1)))
arrays = [int(ck(d.cuMemAlloc(setup["bytes"]))) for _ in range(5)]
stream = ck(d.cuStreamCreate(1))
for launch in setup["launches"]:
    function = ck(d.cuModuleGetFunction(module, launch["name"].encode()))
    fields, buffer, pointers = parameters(launch, setup["bytes"], arrays)
    shape = *launch["grid"], *launch["block"]
    ck(d.cuLaunchKernel(function, *shape, 0, stream, pointers.ctypes.data, 0))
    ck(d.cuStreamBeginCapture(stream, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    ck(d.cuLaunchKernel(function, *shape, 0, stream, pointers.ctypes.data, 0))
    graph = ck(d.cuStreamEndCapture(stream))
    ck(d.cuGraphLaunch(ck(d.cuGraphInstantiate(graph, 0)), stream))
    ck(d.cuStreamSynchronize(stream))
"""
)


@pytest.fixture(name="kernels", scope="module")
def _kernels() -> list[Kernel]:
    return [kernel(seed) for seed in rotation.seeds("predicted", KERNELS, whole=10 * KERNELS)]


def run(kernels: list[Kernel], ptx: bytes, folder: Path, **extra: str) -> list[Submission]:
    """Launch each kernel once, and once in a graph."""
    folder.mkdir()
    (folder / "kernels.ptx").write_bytes(ptx)
    (folder / "program.py").write_text(PROGRAM)
    setup = {
        "ptx": str(folder / "kernels.ptx"),
        "bytes": ARRAY_BYTES,
        "launches": [
            {
                "name": one.name,
                "numbers": one.numbers,
                "block": one.block,
                "grid": one.grid,
                "places": one.places,
            }
            for one in kernels
        ],
    }
    command = [str(folder / "program.py"), json.dumps(setup)]
    _, found, _ = record(command, folder, extra=extra)
    return [one for one in found if one.kernels]


def in_blocks(one: Submission) -> int:
    """How many bytes of the program's memory are predicted."""
    predicted = merged(one.predicted)
    return sum(size(common(block, predicted)) for block in one.blocks)


def test_less_is_predicted_and_nothing_is_missed(kernels: list[Kernel], tmp_path: Path) -> None:
    ptx, known = oracle.compiled(kernels)
    (tmp_path / "table").write_bytes(table.encode(hash_of(ptx), 90, known.values()))
    trusted = tmp_path / "rows"
    trusted.write_bytes(KernelRow(kernels[0].name, suspect=True).packed)
    without = run(kernels, ptx, tmp_path / "without")
    told = run(
        *(kernels, ptx, tmp_path / "told"),
        PHOS_TEST_TABLE=str(tmp_path / "table"),
        PHOS_TEST_KERNELS=str(trusted),
    )
    assert len(told) == len(without) == 2 * len(kernels)
    assert [one.missed for one in told] == [[]] * len(told)
    # A suspect stays one, whatever the table says.
    assert [one.everything for one in told] == [True] * 2 + [False] * (len(told) - 2)
    sizes = [(in_blocks(one), in_blocks(other)) for one, other in zip(told, without, strict=True)]
    # Sometimes half of a dozen random kernels are not known.
    assert sum(less < ARRAY_BYTES for less, _ in sizes[2:]) > len(kernels) // 4
    # A graph writes what its kernel does, of which more may be known by then: what takes many steps
    # is found out beside the program.
    pairs = [(sizes[at][0], sizes[at + 1][0]) for at in range(2, len(told), 2)]
    assert all(graph <= launch for launch, graph in pairs), pairs
    assert sum(graph == launch for launch, graph in pairs) > len(pairs) // 2
