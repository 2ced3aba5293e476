"""Choose the CUDA driver of this process, and make checked calls into it.

A node has a GPU if the NVIDIA kernel driver exists; otherwise the software GPU is used. The choice
is made once per process, before ``cuda.bindings`` looks for ``libcuda.so.1``: it finds a library
that is already loaded under that name.
"""

import ctypes
import functools
import os
import uuid
from pathlib import Path
from typing import Any

from phosd.engine.system.native import softgpu_folder
from phosd.errors import (
    DriverTooOld,
    Internal,
    OutOfMemory,
    PhosError,
    Reason,
    Timeout,
    Unsupported,
)

_DEVICES = Path("/dev")
_KERNEL_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def is_software() -> bool:
    """Return whether this node uses the software GPU (``PHOS_GPU=soft|real`` overrides)."""
    choice = os.environ.get("PHOS_GPU", "auto")
    if choice in ("soft", "real"):
        return choice == "soft"
    return not any(device.exists() for device in _KERNEL_DRIVERS)


def has_several_gpus() -> bool:
    """Return whether the node has more than one NVIDIA GPU; no driver is loaded to see it."""
    return len(list(_DEVICES.glob("nvidia[0-9]*"))) > 1


def software_gpu() -> Path:
    """Return the folder for a program's ``LD_LIBRARY_PATH`` to make it use the software GPU.

    Raises :class:`Unsupported` if it does not exist: this node then has no GPU at all.
    """
    try:
        return softgpu_folder()
    except Internal as error:
        raise _no_gpu(error) from error


def _no_gpu(why: Exception) -> Unsupported:
    return Unsupported(
        f"there is no NVIDIA driver, and the software GPU does not load ({why})",
        hint="run `make build`, or install the NVIDIA driver (r580 or newer)",
        reason=Reason.NO_GPU,
    )


@functools.cache
def bindings() -> Any:
    """Return the module ``cuda.bindings.driver``, bound to this node's driver, which may not be
    initialised yet: then this process uses no GPU.

    Raises :class:`Unsupported` if the driver does not load.
    """
    if is_software():
        try:
            ctypes.CDLL(str(software_gpu() / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise _no_gpu(error) from error
    from cuda.bindings import driver as module

    try:
        module.cuDriverGetVersion()  # the first call looks for the library
    except RuntimeError as error:
        raise Unsupported(
            f"the CUDA driver library does not load ({error})",
            hint="install the NVIDIA driver (r580 or newer), or set PHOS_GPU=soft",
            reason=Reason.NO_GPU,
        ) from error
    return module


@functools.cache
def driver() -> Any:
    """Return :func:`bindings`, with the driver initialised.

    Raises :class:`Unsupported` if there is no usable GPU.
    """
    module = bindings()
    (status,) = module.cuInit(0)
    if status != module.CUresult.CUDA_SUCCESS:
        raise Unsupported(
            f"the CUDA driver does not start ({status.name})",
            hint="see `phos doctor`",
            reason=Reason.NO_GPU,
        )
    return module


def call(name: str, *arguments: Any, about: str = "") -> Any:
    """Call driver function ``name`` and return its value(s). Raises a typed error on failure.

    ``about`` says what the call was for, for the message.
    """
    module = driver()
    try:
        status, *values = getattr(module, name)(*arguments)
    except RuntimeError as error:  # cuda.bindings: the driver lacks the function
        raise DriverTooOld(
            f"the driver has no {name} ({error})", hint="install driver r580 or newer"
        ) from error
    if status != module.CUresult.CUDA_SUCCESS:
        raise _error(name, status, about)
    return values[0] if len(values) == 1 else tuple(values)


def check(name: str, status: int, about: str = "") -> None:
    """Raise a typed error unless ``status``, which driver function ``name`` returned, is 0."""
    if status:
        raise _error(name, driver().CUresult(status), about)


def _error(name: str, status: Any, about: str) -> PhosError:
    what = f"{name}{f' for {about}' if about else ''} failed: {status.name}"
    kinds: dict[str, tuple[type[PhosError], str]] = {
        "CUDA_ERROR_OUT_OF_MEMORY": (OutOfMemory, "free device memory and try again"),
        "CUDA_ERROR_NOT_SUPPORTED": (
            Unsupported,
            "the process uses something that the driver cannot save, such as an active profiler"
            " (CUPTI, as of torch.profiler): end that and try again",
        ),
        "CUDA_ERROR_NOT_READY": (Timeout, "the process did not reach a safe point; try again"),
        "CUDA_ERROR_OPERATING_SYSTEM": (  # docs/design/driver.md: a-restore-needs-memory
            Internal,
            "if an earlier restore of the process has failed, it is lost: end it, and restore its "
            "last image",
        ),
        "CUDA_ERROR_NOT_FOUND": (DriverTooOld, "install driver r580 or newer"),
    }
    kind, hint = kinds.get(status.name, (Internal, "see the driver's log (dmesg)"))
    return kind(what, hint=hint, reason=Reason.DRIVER_REFUSES if kind is Unsupported else "")


def gpu_uuid(raw: bytes) -> str:
    """Return a GPU's UUID (16 bytes) as ``nvidia-smi`` writes it: ``GPU-xxxxxxxx-xxxx-...``."""
    return f"GPU-{uuid.UUID(bytes=raw)}"


def driver_version() -> int:
    """Return the driver's CUDA version, such as ``13000`` for 13.0."""
    return int(call("cuDriverGetVersion"))
