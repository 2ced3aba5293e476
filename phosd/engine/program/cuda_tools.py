"""Find CUDA's debuggers, profilers and checkers in a process.

They have state in the driver, and see its calls: the driver's checkpoint saves neither, and refuses
a process with some of them only when it is locked, after the program has been stopped.
"""

import os
from contextlib import suppress
from pathlib import Path

from phosd.engine.system import procfs
from phosd.errors import Reason, Unsupported

_LIBRARIES = {
    b"libcuda-injection.so": "Nsight Compute (ncu)",
    b"libcudadebugger.so": "CUDA's debugger (cuda-gdb)",
    b"libsanitizer-collection.so": "compute-sanitizer",
    b"libToolsInjection64.so": "Nsight Systems (nsys)",
}
"""Libraries, up to their versions, that a program has only if it was started under the tool, or the
tool is attached to it.
"""
_INJECTED = b"CUDA_INJECTION64_PATH="
"""The variable with the library that libcuda loads into each program, for any other tool."""


def require_none(pid: int) -> None:
    """Raise :class:`Unsupported`, naming the tool, if one is in the process."""
    if tool := tool_in(pid):
        raise Unsupported(
            f"{procfs.describe(pid)} runs under {tool}, which the driver cannot save",
            hint="the program goes on; detach the tool, or start the program without it",
            reason=Reason.CUDA_TOOL,
        )


def tool_in(pid: int) -> str:
    """Return the tool in a process, in words; nothing if there is none, or that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        maps = (procfs.PROC / str(pid) / "maps").read_bytes()
        for library, tool in _LIBRARIES.items():
            if b"/" + library in maps:
                return tool
        for variable in procfs.environment(pid):
            if variable.startswith(_INJECTED):
                injected = os.fsdecode(variable.removeprefix(_INJECTED))
                if os.fsencode(f"/{Path(injected).name}\n") in maps:
                    return f"the tool {injected} (CUDA_INJECTION64_PATH)"
    return ""
