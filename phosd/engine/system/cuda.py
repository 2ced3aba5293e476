"""Which CUDA driver this process talks to, and checked calls into it.

A node has a GPU when the NVIDIA kernel driver is there; otherwise the software GPU stands in. The
choice is made once a process, before ``cuda.bindings`` looks for ``libcuda.so.1``: one already
loaded under that name is the one it finds.
"""

import ctypes
import functools
import os
import uuid
from pathlib import Path
from typing import Any

from phosd.engine.system.native import softgpu_folder
from phosd.errors import DriverTooOld, Internal, OutOfMemory, PhosError, Timeout, Unsupported

_KERNEL_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def is_software() -> bool:
    """Whether this node works on the software GPU (``PHOS_GPU=soft|real`` decides by hand)."""
    choice = os.environ.get("PHOS_GPU", "auto")
    if choice in ("soft", "real"):
        return choice == "soft"
    return not any(device.exists() for device in _KERNEL_DRIVERS)


def software_gpu() -> Path:
    """The folder a program needs on ``LD_LIBRARY_PATH`` to see the software GPU.

    Raises :class:`Unsupported` when it is not there: then this node has no GPU at all.
    """
    try:
        return softgpu_folder()
    except Internal as error:
        raise _no_gpu(error) from error


def _no_gpu(why: Exception) -> Unsupported:
    return Unsupported(
        f"there is no NVIDIA driver, and the software GPU does not load ({why})",
        hint="run `make build`, or install the NVIDIA driver (r580 or newer)",
    )


@functools.cache
def driver() -> Any:
    """The module ``cuda.bindings.driver``, bound to this node's driver and initialised.

    Raises :class:`Unsupported` when there is no usable GPU.
    """
    if is_software():
        try:
            ctypes.CDLL(str(software_gpu() / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise _no_gpu(error) from error
    from cuda.bindings import driver as bindings

    try:
        (status,) = bindings.cuInit(0)
    except RuntimeError as error:
        raise Unsupported(
            f"the CUDA driver library does not load ({error})",
            hint="install the NVIDIA driver (r580 or newer), or set PHOS_GPU=soft",
        ) from error
    if status != bindings.CUresult.CUDA_SUCCESS:
        raise Unsupported(
            f"the CUDA driver does not start ({status.name})", hint="see `phos doctor`"
        )
    return bindings


def call(name: str, *arguments: Any, about: str = "") -> Any:
    """Call driver function ``name`` and return its value(s); a failure raises a typed error.

    ``about`` says what the call was for, for the message.
    """
    bindings = driver()
    try:
        status, *values = getattr(bindings, name)(*arguments)
    except RuntimeError as error:  # cuda.bindings: the driver lacks the function
        raise DriverTooOld(
            f"the driver has no {name} ({error})", hint="install driver r580 or newer"
        ) from error
    if status != bindings.CUresult.CUDA_SUCCESS:
        raise _error(name, status, about)
    return values[0] if len(values) == 1 else tuple(values)


def _error(name: str, status: Any, about: str) -> PhosError:
    what = f"{name}{f' for {about}' if about else ''} failed: {status.name}"
    kinds: dict[str, tuple[type[PhosError], str]] = {
        "CUDA_ERROR_OUT_OF_MEMORY": (OutOfMemory, "free device memory and try again"),
        "CUDA_ERROR_NOT_SUPPORTED": (
            Unsupported,
            "the process uses something that the driver cannot save",
        ),
        "CUDA_ERROR_NOT_READY": (Timeout, "the process did not reach a safe point; try again"),
        "CUDA_ERROR_NOT_FOUND": (DriverTooOld, "install driver r580 or newer"),
    }
    kind, hint = kinds.get(status.name, (Internal, "see the driver's log (dmesg)"))
    return kind(what, hint=hint)


def gpu_uuid(raw: bytes) -> str:
    """A GPU's UUID (16 bytes) as ``nvidia-smi`` writes it: ``GPU-xxxxxxxx-xxxx-...``."""
    return f"GPU-{uuid.UUID(bytes=raw)}"


def driver_version() -> int:
    """The driver's CUDA version, as ``13000`` for 13.0."""
    return int(call("cuDriverGetVersion"))
