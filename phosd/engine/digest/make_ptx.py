"""Compile digest.cu to digest.ptx with NVRTC 13.0. Run it after every change of the kernel."""

import re
from pathlib import Path

from cuda.bindings import nvrtc

HERE = Path(__file__).parent
OPTIONS = [b"--gpu-architecture=compute_75", b"--std=c++17"]


def compile_ptx() -> str:
    """Return the kernel as PTX text, without the compiler's build comments."""
    headers = [(HERE / "digest.h").read_bytes()]
    source = (HERE / "digest.cu").read_bytes()
    status, program = nvrtc.nvrtcCreateProgram(source, b"digest.cu", 1, headers, [b"digest.h"])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"NVRTC does not take the program: {status.name}")
    (status,) = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), OPTIONS)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    text = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, text)
    return re.sub(r"(?m)^//.*\n", "", text.rstrip(b"\0").decode()).strip() + "\n"


if __name__ == "__main__":
    (HERE / "digest.ptx").write_text(compile_ptx())
