"""Functions of a driver that is newer than the hook."""

import subprocess
from pathlib import Path

import pytest

from tests.native.hook.live import live
from tests.support.harness import wait_until

PROGRAMS = Path(__file__).parent / "programs"

STRANGERS = """
import ctypes, os, threading
from ctypes import c_char, c_double, c_float, c_int, c_long

class Small(ctypes.Structure):
    _fields_ = [("real", c_double), ("whole", c_long)]

class Large(ctypes.Structure):
    _fields_ = [("values", c_long * 4)]

primary(0)
library = ctypes.CDLL(os.environ["STRANGERS"])
later = library.cuStreamBatchMemOpLater
later.restype, later.argtypes = c_long, (c_long,)
library.cuDeviceGetColour
"""

CALLS = """
sys.stdin.readline()
whole, real = c_long(), c_double()
values = [3 ** n for n in range(10)]
expected = sum((n + 1) * v for n, v in enumerate(values))
assert library.cuLaunchTenIntegers(*map(c_long, values), ctypes.byref(whole)) == 0
assert whole.value == expected, whole
assert library.cuMemcpyTenDoublesAsync(*(c_double(v / 4) for v in values), ctypes.byref(real)) == 0
assert real.value == expected / 4, real
mixed = library.cuMemsetMixedAsync
mixed.argtypes = (c_int, c_float, Small, Large, c_float, c_char, ctypes.c_void_p)
large = Large((c_long * 4)(7, 0, 0, 11))
assert mixed(3, 0.5, Small(0.25, 5), large, 1.5, b"A", ctypes.byref(real)) == 0
assert real.value == 3 + 1 + 0.75 + 20 + 35 + 66 + 10.5 + 8 * 65, real
ctypes.set_errno(77)
assert later(5) == 5 * 0x100000001
assert library.cuDeviceGetColour(2) == 42
say("called")
sys.stdin.readline()
threading.Thread(target=lambda: say(later(1) % 1000)).start()
"""


def build(source: Path, library: Path) -> None:
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True)


@pytest.fixture
def newer(tmp_path: Path) -> dict[str, str]:
    """The environment that tells of a driver library with functions of its own."""
    library = tmp_path / "libcuda.so.999"
    build(PROGRAMS / "strangers.c", library)
    return {"STRANGERS": str(library)}


def test_they_get_their_arguments_and_wait_at_the_gate(
    tmp_path: Path, newer: dict[str, str]
) -> None:
    with live(STRANGERS + CALLS, tmp_path, **newer) as program:
        assert program.link.hello().parkable, "to look a function up is harmless"
        program.tell()
        assert program.hears() == "called"
        hello = program.link.hello()
        assert not hello.parkable and not hello.uses_unsupported
        assert "cuLaunchTenIntegers" in hello.reason
        program.close_gate()
        program.tell()
        wait_until(lambda: program.link.close_gate(60).waiting == 1, "the stranger")
        program.link.open_gate()
        assert program.hears() == str(0x100000001 % 1000)


def test_more_of_them_than_there_are_stand_ins(tmp_path: Path) -> None:
    """Then to find one is to be suspected of calling it."""
    names = [f"cuLaunchNumber{n}" for n in range(300)]
    source = tmp_path / "many.c"
    source.write_text("".join(f"int {name}(int x) {{ return x + 1; }}\n" for name in names))
    library = tmp_path / "libcuda.so.998"
    build(source, library)
    code = f"""
import ctypes
library = ctypes.CDLL({str(library)!r})
found = [getattr(library, f"cuLaunchNumber{{n}}") for n in range(256)]
say("found")
sys.stdin.readline()
found += [getattr(library, f"cuLaunchNumber{{n}}") for n in range(256, 300)]
say(sum(function(n) for n, function in enumerate(found)))
sys.stdin.readline()
"""
    with live(code, tmp_path) as program:
        assert program.hears() == "found"
        assert program.link.hello().parkable
        program.tell()
        assert program.hears() == str(sum(range(1, 301)))
        assert "cuLaunchNumber256" in program.link.hello().reason
        program.tell()
