"""What a program could notice of the hook, and does not: errno, output, and where names lead."""

import subprocess
import sys
from pathlib import Path

from tests.native.hook.live import PRELUDE, live
from tests.support.harness import PATIENCE, environment, wait_until

PROGRAMS = Path(__file__).parent / "programs"

ERRNO = r"""
import ctypes
from ctypes import byref, c_size_t, c_uint, c_uint64, c_void_p

library = ctypes.CDLL("libcuda.so.1", use_errno=True)
primary(0)
module = ok(driver.cuModuleLoadData(
    b".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\0"
))
kernel = c_void_p(int(ok(driver.cuModuleGetFunction(module, b"nothing"))))

def errno_after(name, *arguments):
    ctypes.set_errno(77)
    result = library[name](*arguments)
    assert result in (0, 2), (name, result)
    return ctypes.get_errno()

at = c_uint64()
launch = ("cuLaunchKernel", kernel, *[c_uint(1)] * 6, c_uint(0), None, None, None)
found = {errno_after(*launch)}
for size in (1000, 3 << 20, 1 << 40):
    found.add(errno_after("cuMemAlloc_v2", byref(at), c_size_t(size)))
    if size < 1 << 40:
        found.add(errno_after("cuMemsetD8_v2", at, c_uint(1), c_size_t(size)))
        found.add(errno_after("cuMemFree_v2", at))
say(*found)
sys.stdin.readline()
say(errno_after(*launch))  # the gate holds it
sys.stdin.readline()
"""


def test_errno_and_the_output_stay_the_programs(tmp_path: Path) -> None:
    """Also when an allocation fails, and when a call is held at the gate."""
    with live(ERRNO, tmp_path) as program:
        assert program.hears() == "77"
        program.close_gate()
        program.tell()
        wait_until(lambda: program.link.close_gate(PATIENCE).waiting, "the launch")
        program.link.open_gate()
        assert program.hears() == "77"
        program.tell()


ABSURD = """
primary(0)
stream = ok(driver.cuStreamCreate(0))
for shift in range(33, 64):
    for size in (1 << shift, (1 << shift) + 1, (1 << shift) + (1 << shift - 1)):
        say(shift, *(int(result[0]) for result in (
            driver.cuMemAlloc(size),
            driver.cuMemAllocAsync(size, stream),
            driver.cuMemAllocPitch(size, 1, 4),
            driver.cuMemAllocPitch(1, size, 4),
        )))
"""


def test_absurd_sizes_are_too_large_and_nothing_else(tmp_path: Path) -> None:
    outputs = []
    for hooked in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", PRELUDE + ABSURD],
            env=environment(hooked=hooked, runtime=tmp_path),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert (done.returncode, done.stderr) == (0, "")
        outputs.append(done.stdout.splitlines())
    too_large = [f"{shift} 2 2 2 2" for shift in range(33, 64) for _ in range(3)]
    assert outputs == [too_large, too_large]


NAMES = r"""
import ctypes, os
from ctypes import c_char_p, c_void_p

class Info(ctypes.Structure):
    _fields_ = [("file", c_char_p), ("base", c_void_p), ("name", c_char_p), ("at", c_void_p)]

own = ctypes.CDLL(None)
own.dlsym.restype = c_void_p
own.dlsym.argtypes = (c_void_p, c_char_p)
own.dladdr.argtypes = (c_void_p, c_void_p)

def owner(handle, name):
    found = own.dlsym(handle, name)
    if not found:
        return None
    info = Info()
    assert own.dladdr(found, ctypes.byref(info))
    return os.path.basename(info.file.decode())

print(owner(None, b"cuMemAlloc_v2"))
driver = ctypes.CDLL("libcuda.so.1")
print(owner(driver._handle, b"cuMemAlloc_v2"))
print(owner(driver._handle, b"cuDriverGetVersion"))
print(owner(driver._handle, b"cuNoSuchFunction"))
ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
print(owner(None, b"cuMemAlloc_v2"))
other = ctypes.CDLL(os.environ["OTHER"])
print(owner(other._handle, b"cuMemAlloc_v2"), owner(other._handle, b"cudnnCreate"))
"""


def compile_c(out: Path, source: str, *options: str | Path) -> Path:
    command = ["gcc", "-O1", "-Wall", "-o", out, PROGRAMS / source, *options]
    subprocess.run(command, check=True)
    return out


def output(command: list[str | Path], *, hooked: bool, **extra: str) -> list[str]:
    done = subprocess.run(
        command,
        env=environment(hooked=hooked, extra=extra),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_names_lead_to_the_wrapper_where_they_led_to_the_driver(tmp_path: Path) -> None:
    other = compile_c(tmp_path / "libother.so", "first_library.c", "-shared", "-fPIC")
    command: list[str | Path] = [sys.executable, "-c", NAMES]
    plain = output(command, hooked=False, OTHER=str(other))
    hooked = output(command, hooked=True, OTHER=str(other))
    cuda, hook, others = "libcuda.so.1", "libphos_hook.so", "libother.so libother.so"
    assert plain == ["None", cuda, cuda, "None", cuda, others]
    assert hooked == ["None", hook, cuda, "None", hook, others]


def test_the_next_definition_is_that_after_the_caller(tmp_path: Path) -> None:
    """A name only begins as the driver's do, and another one might be the driver's."""
    shared = ("-shared", "-fPIC")
    second = compile_c(tmp_path / "libsecond.so", "second_library.c", *shared)
    first = compile_c(tmp_path / "libfirst.so", "first_library.c", *shared)
    program = compile_c(
        tmp_path / "program",
        "next_definition.c",
        "-Wl,--no-as-needed",
        first,
        second,
        f"-Wl,-rpath,{tmp_path}",
    )
    assert output([program], hooked=False) == ["second", "second"]
    assert output([program], hooked=True) == ["second", "second"]
