"""The list of functions, held against what the library exports and what CUDA's headers know."""

import re
import subprocess
import sys
from pathlib import Path

from phosd.engine.system import native

ROOT = Path(__file__).parents[3]
LIST = (ROOT / "phosd/softgpu/api/entry.def").read_text()
PLAIN = re.findall(r"^ENTRY\((\w+), (\d+), (\w+)\)", LIST, re.M)
STREAM = re.findall(r"^STREAM_ENTRY\((\w+), (\d+), (\w+), (_\w+)\)", LIST, re.M)


def test_every_export_is_listed_and_every_entry_exported() -> None:
    library = native.softgpu_folder() / "libcuda.so.1"
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    exported = set(re.findall(r" T (cu[A-Z]\w*)", symbols))
    listed = {symbol for _, _, symbol in PLAIN}
    listed |= {name for _, _, symbol, suffix in STREAM for name in (symbol, symbol + suffix)}
    assert exported == listed
    assert len(exported) > 250


def test_versions_are_those_of_the_headers() -> None:
    header = subprocess.run(
        [sys.executable, ROOT / "packaging/find_cuda_header.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    known = (Path(header) / "cudaTypedefs.h").read_text()
    for name, since, *_ in [*PLAIN, *STREAM]:
        if not name.startswith("cuProfiler"):
            assert re.search(rf"\bPFN_{name}_v{since}\b", known), (name, since)
    for name, _, _, suffix in STREAM:
        assert re.search(rf"\bPFN_{name}_v\d+{suffix}\b", known), name
