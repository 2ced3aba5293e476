"""Programs that compile to machine code: with NVRTC as the software GPU's compiler they run."""

import re
import subprocess
import sysconfig
from pathlib import Path

from phosd.engine.system import native
from tests.native.softgpu import program

COMPILER = Path(sysconfig.get_path("purelib"), "nvidia/cu13/lib/libnvrtc.so.13")

CODE = """
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch
device = Device(); device.set_current(); stream = device.create_stream()
source = 'template <typename T> __global__ void fill(T* p, T v) { p[threadIdx.x] = v; }'
program = Program(source, "c++", ProgramOptions(arch="sm_90"))
kernel = program.compile("cubin", name_expressions=["fill<int>"]).get_kernel("fill<int>")
p = device.allocate(128, stream=stream)
launch(stream, LaunchConfig(grid=1, block=32), kernel, int(p.handle), np.int32(7))
stream.sync(); assert (fetch(int(p.handle), 32) == 7).all()
"""


def _shim() -> Path:
    return native.softgpu_folder() / "nvrtc/libnvrtc.so.13"


def test_what_was_compiled_to_machine_code_runs(tmp_path: Path) -> None:
    program.run(CODE, tmp_path, LD_PRELOAD=str(_shim()), PHOS_SOFTGPU_NVRTC=str(COMPILER))


def test_a_virtual_architecture_has_no_machine_code(tmp_path: Path) -> None:
    """As with NVIDIA's own, so that programs which look at the size go on to the PTX."""
    program.run(
        """
from cuda.bindings import nvrtc
def size(arch):
    handle = nvrtc.nvrtcCreateProgram(b"__global__ void f() {}", b"f.cu", 0, None, None)[1]
    assert nvrtc.nvrtcCompileProgram(handle, 1, [b"-arch=" + arch])[0] == 0
    return nvrtc.nvrtcGetCUBINSize(handle)[1], nvrtc.nvrtcGetPTXSize(handle)[1]
cubin, ptx = size(b"compute_90"); assert cubin == 0 < ptx
cubin, ptx = size(b"sm_90"); assert cubin == ptx
""",
        tmp_path,
        LD_PRELOAD=str(_shim()),
        PHOS_SOFTGPU_NVRTC=str(COMPILER),
    )


def test_without_a_compiler_the_error_says_what_to_set(tmp_path: Path) -> None:
    out = program.run(
        """
nvrtc = ctypes.CDLL("libnvrtc.so.13"); nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
major, minor = ctypes.c_int(), ctypes.c_int()
print(nvrtc.nvrtcGetErrorString(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))))
""",
        tmp_path,
        LD_PRELOAD=str(_shim()),
        PHOS_SOFTGPU_NVRTC=str(tmp_path / "nothing"),
    )
    assert "PHOS_SOFTGPU_NVRTC" in out


def test_every_function_of_the_compiler_is_passed_on() -> None:
    def exported(library: Path) -> set[str]:
        symbols = subprocess.run(
            ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
        ).stdout
        return set(re.findall(r" T (nvrtc\w+@@libnvrtc\.so\.13)", symbols))

    assert len(exported(COMPILER)) > 20
    assert exported(_shim()) == exported(COMPILER)
