"""Launches are run twice, which the program does not notice, and compared with their verdicts.

The driver is the software GPU's, and CUPTI one that calls back about what the program tells it to.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from bench import truth
from bench.rerun import (
    ENDING,
    Instance,
    Records,
    built,
    compiled,
    placed,
    read_records,
    summed_up,
)
from bench.truth import Judged
from tests.native.corpus.device import compile_ptx
from tests.native.softgpu import program

SOURCE = """
extern "C" __global__ void scale(unsigned* out, const unsigned* in) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i] * 2;
}
extern "C" __global__ void advance(unsigned* numbers) {
    numbers[blockIdx.x * blockDim.x + threadIdx.x] += 1;
}
extern "C" __global__ void settle(unsigned* numbers) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    numbers[i] = numbers[i] | 1;
}
extern "C" __global__ void gather(unsigned* out, unsigned** table) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = table[0][i];
}
"""
RUN = """
setup = json.loads(sys.argv[1])
use()
fake = ctypes.CDLL(setup["cupti"], ctypes.RTLD_GLOBAL)
ctypes.CDLL(setup["library"]).InitializeInjection()  # as the driver does
def do(name, *arguments):
    assert getattr(fake, name)(*arguments) == 0, name
module = ctypes.c_void_p()
do("fake_load", ctypes.byref(module), open(setup["ptx"], "rb").read())
functions = {
    name: int(ck(d.cuModuleGetFunction(int(module.value), name.encode())))
    for name in ("scale", "advance", "settle", "gather")
}
def allocate(size):
    address = ctypes.c_uint64()
    do("fake_allocate", ctypes.byref(address), ctypes.c_size_t(size))
    return address.value
COUNT, BLOCKS = 512, 4
one, other, table, rest, odd = (allocate(4 * COUNT + more) for more in (0, 0, 0, 0, 13))
for address, start in ((one, 1), (other, 5), (odd, 7)):
    numbers = np.arange(start, start + COUNT, dtype=np.uint32)
    ck(d.cuMemcpyHtoD(address, numbers.ctypes.data, numbers.nbytes))
pointer = ctypes.c_uint64(one)
ck(d.cuMemcpyHtoD(table, ctypes.addressof(pointer), 8))
def launch(name, *pointers, call="fake_launch", blocks=BLOCKS):
    values = [ctypes.c_uint64(each) for each in pointers]
    array = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    function = ctypes.c_void_p(functions[name])
    do(call, function, blocks, COUNT // blocks, array)
for _ in range(4):
    launch("scale", other, one)
    launch("advance", odd)
launch("advance", one, call="fake_launch_ex", blocks=2)
launch("settle", rest, blocks=1)
launch("gather", other, table)
fake.fake_capture(1)
launch("advance", odd, blocks=8)
fake.fake_capture(0)
stray = int(ck(d.cuMemAlloc(4 * COUNT)))  # nobody was told
launch("scale", stray, one, blocks=1)
do("fake_free", ctypes.c_uint64(other))
launch("gather", one, table, blocks=1)
ck(d.cuCtxSynchronize())
print(json.dumps([fetch(one, 2).tolist(), fetch(odd, 2).tolist()]))
"""


def of_kernel(found: list[Instance], name: str) -> list[tuple[int, bool | None, int]]:
    return [(one.grid[0], one.same, one.strays) for one in found if one.kernel == name]


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what was recorded of a program, whose values are its own."""
    folder = tmp_path_factory.mktemp("twice")
    library, cupti = built(folder), folder / "libcupti.so"
    compiled(cupti, [Path(__file__).with_name("fake_cupti.cpp")])
    ptx = folder / "kernels.ptx"
    ptx.write_bytes(compile_ptx(SOURCE, "compute_90").split(b"\0")[0])
    setup = {"cupti": str(cupti), "library": str(library), "ptx": str(ptx)}
    out = program.run(
        f"import json\nsys.argv[1:] = [{json.dumps(json.dumps(setup))}]\n{RUN}",
        folder,
        TWICE_RECORDS=str(folder / "program.records"),
        TWICE_CUPTI=str(cupti),
    )
    assert json.loads(out) == [[2, 3], [12, 13]]  # as without a second run
    return folder


@pytest.fixture(name="records", scope="module")
def _records(folder: Path) -> Records:
    return read_records(folder / "program.records")


def test_what_was_run_twice(records: Records) -> None:
    assert records.errors == []
    found = list(records.instances.values())
    assert of_kernel(found, "scale") == [(4, True, 0)] * 3 + [(1, True, 1)]
    assert of_kernel(found, "advance") == [(4, False, 0)] * 3 + [(2, False, 0)]
    assert of_kernel(found, "settle") == [(1, True, 0)]
    assert of_kernel(found, "gather") == [(4, True, 0), (1, True, 0)]
    assert records.skipped == {"a stream is captured": 1}


def test_truth_and_verdicts(folder: Path, records: Records) -> None:
    instances = placed(records, folder, 90)
    said = summed_up(records, instances)
    assert (said["same"], said["differ"], said["strays"]) == (6, 4, 1)
    assert said["errors"] == []
    (folder / f"program{ENDING}").write_bytes(msgspec.json.encode(instances))
    (compared,) = truth.compare(folder, 90, 60)
    assert {(one.kernel, judged) for _, one, judged in compared.rows} == {
        ("scale", Judged("idempotent", "idempotent")),
        ("advance", Judged("not", "not")),
        ("settle", Judged("not", "not")),
        ("gather", Judged("unknown", "unknown")),
    }
    row = "10 | 6 | 3 | 3 (50.0%) | 0 | 3 | 3 (50.0%) | 0 |"
    assert truth.table([compared]).splitlines()[2:] == [
        f"| program | {row}",
        f"| all: compiled at run time | {row}",
    ]
    assert not list(truth.false_positives([compared]))
    compared.rows = [
        (library, msgspec.structs.replace(one, same=one.kernel != "scale"), judged)
        for library, one, judged in compared.rows
    ]
    wrong = list(truth.false_positives([compared]))
    assert len(wrong) == 3
    assert f"parameters {instances[0].parameters.hex()}" in wrong[0]
