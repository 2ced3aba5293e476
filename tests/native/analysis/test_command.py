"""``phos analyse``, on modules as nvcc and NVRTC make them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from phosd.cli.main import main
from phosd.engine.analysis.code.tools import Tool, run
from tests.native.analysis.oracle import machine_code
from tests.system.cli.test_json import check

SOURCE = """
extern "C" __global__ void add(float* out, const float* in, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] + 1;
}
extern "C" __global__ void chase(float** table, float* in) { table[threadIdx.x][0] = in[0]; }
struct Table { int* at[16]; };
extern "C" __global__ void pick(const __grid_constant__ Table t, const int* in) {
    *t.at[blockIdx.x] = in[0];
}
extern "C" __global__ void count(int* at, const int* which) { atomicAdd(at + which[0], 1); }
"""


@pytest.fixture(name="module", scope="module")
def _module() -> tuple[bytes, bytes]:
    return machine_code(SOURCE)


def analyse(path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["analyse", str(path), *options])


def test_roles_and_ranges(module: tuple[bytes, bytes], tmp_path: Path) -> None:
    for name, content in zip(("k.ptx", "k.cubin"), module, strict=True):
        (tmp_path / name).write_bytes(content)
        done = analyse(tmp_path / name, "--json")
        rows = {row["kernel"]: row for row in map(json.loads, done.stdout.splitlines())}
        check(rows.values(), "`phos analyse`")
        assert rows["add"]["roles"] == {"0": "written", "8": "read"}
        assert rows["add"]["ranges_read"] and rows["add"]["ranges_written"]
        assert not rows["add"]["unknown_reads"] and not rows["add"]["unknown_writes"]
        assert rows["chase"]["unknown_writes"] == ["loaded"]
        assert rows["chase"]["unknown_reads"] == []
        assert rows["count"]["roles"] == {"0": "both", "8": "read"}
        assert not rows["count"]["ranges_written"]
        assert {name: row["idempotent"] for name, row in rows.items()} == {
            "add": "depends",
            "chase": "unknown",
            "count": "never",
            "pick": "depends",
        }
        assert rows["count"]["idempotent_why"] == ["atomic operation"]
        assert rows["pick"]["roles"] == {"128": "read", "*": "written"}
        assert rows["pick"]["unknown_writes"] == []


def test_one_kernel(module: tuple[bytes, bytes], tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(module[1])
    done = analyse(tmp_path / "k", "--kernel", "chase", "--json")
    assert [json.loads(line)["kernel"] for line in done.stdout.splitlines()] == ["chase"]
    assert "no such kernels" in analyse(tmp_path / "k", "--kernel", "none").stderr


def test_what_is_printed(module: tuple[bytes, bytes], tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(module[1])
    done = analyse(tmp_path / "k")
    assert done.exit_code == 0
    facts = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "  " in line)
    said = {name: facts[name].strip() for name in ("roles", "unknown", "again")}
    assert said["roles"] == "3 (75%)"
    assert said["unknown"] == "loaded (1)"
    assert said["again"].startswith("depends (2), ")


def test_a_launch_decides_which_pointer_is_taken(tmp_path: Path) -> None:
    source = """extern "C" __global__ void either(int* at, int** table, bool from_table) {
        *(from_table ? table[0] : at) = 1;
    }"""
    (tmp_path / "k").write_bytes(machine_code(source)[1])
    (row,) = map(json.loads, analyse(tmp_path / "k", "--json").stdout.splitlines())
    assert row["unknown_writes"] == ["loaded"]
    assert row["idempotent"] == "depends"


def test_a_file_that_is_no_module(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"nothing")
    done = analyse(tmp_path / "k")
    assert done.exit_code == 6
    assert "the file is no cubin" in done.stderr


def test_another_architecture(module: tuple[bytes, bytes], tmp_path: Path) -> None:
    image = run(Tool.PTXAS, ["--gpu-name", "sm_120"], module[0])
    (tmp_path / "k").write_bytes(image)
    (row, *_) = map(json.loads, analyse(tmp_path / "k", "--json").stdout.splitlines())
    assert row["unknown_writes"] == ["the machine code is for sm_120"]
