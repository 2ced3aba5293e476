"""Make the environment of a program that is to be saved and restored."""

import ctypes
import os
from pathlib import Path

from phosd.cli.settings import Settings
from phosd.client.errors import CommandError
from phosd.engine.system import cuda
from phosd.engine.system.native import hook_library
from phosd.errors import Reason, Unsupported

DEFAULT_RUNTIME = Path("/run/phos")
SAVABLE = {
    # CRIU does not save io_uring, which libuv would use: that of PyTorch's TCPStore, for one.
    "UV_USE_IO_URING": "0",
    # The driver's checkpoint hangs when there is a multicast object, and NCCL makes one.
    "NCCL_NVLS_ENABLE": "0",
    # Host memory that NCCL shares by handles of the driver; without, it is memory of /dev/shm.
    "NCCL_CUMEM_HOST_ENABLE": "0",
}
"""Variables by which libraries do without what cannot be saved."""
_OPENCL = Path("/etc/OpenCL/vendors")
"""Where OpenCL's loaders look for the drivers of vendors: a file for each, with its library."""
_OTHER_PLACES = ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH")
"""Variables with another place for that."""
_MORE = "OCL_ICD_FILENAMES"
"""The variable with libraries besides; images of containers set it, too."""


def environment(
    settings: Settings, gpu: str, runtime_dir: Path | None, managed: str | None
) -> dict[str, str]:
    """Return our environment, changed so that the hook is in the program, and that libraries do
    without what cannot be saved; what the user should know of that is noted.

    Raises :class:`Unsupported` and :class:`CommandError`.
    """
    variables = dict(os.environ)
    prepend(variables, "LD_PRELOAD", hook_library())
    settings_of_nccl = do_without_what_cannot_be_saved(variables)
    if settings_of_nccl and cuda.has_several_gpus():
        settings.note(
            f"phos: NCCL does without what cannot be saved ({' '.join(settings_of_nccl)}); set "
            "these variables to decide otherwise"
        )
    if settings_of_opencl := do_without_nvidias_opencl(variables):
        settings.note(
            "phos: the program finds no OpenCL of NVIDIA, which would open the GPU beside CUDA and "
            f"cannot be saved ({' '.join(settings_of_opencl)}); set OCL_ICD_VENDORS to decide "
            "otherwise"
        )
    if _use_software_gpu(gpu):
        prepend(variables, "LD_LIBRARY_PATH", cuda.software_gpu())
        why = "as you asked" if gpu == "soft" else "there is no GPU here"
        settings.note(f"phos: {why}; the program gets the software GPU")
    if managed is not None:
        variables["PHOS_MANAGED"] = managed
        if managed == "host":
            settings.note("phos: managed memory is in the host; the GPU fetches it at each access")
    if runtime_dir is not None:
        variables["PHOS_RUNTIME_DIR"] = str(runtime_dir.absolute())
    _tell_of_hook_folder(settings, (runtime_dir or DEFAULT_RUNTIME) / "hook")
    return variables


def do_without_what_cannot_be_saved(environment: dict[str, str]) -> list[str]:
    """Set the variables for that which are not set. Returns those for NCCL, as assignments."""
    added = {name: value for name, value in SAVABLE.items() if name not in environment}
    environment |= added
    return [f"{name}={value}" for name, value in added.items() if name.startswith("NCCL_")]


def do_without_nvidias_opencl(environment: dict[str, str], vendors: Path = _OPENCL) -> list[str]:
    """Keep OpenCL's loaders from NVIDIA's driver, which they load for whoever asks for devices, as
    OpenCV and Open MPI do. The drivers of other vendors stay. Returns the variables that were set,
    as assignments: none if the program was told where to look, or would not find NVIDIA's.
    """
    if any(name in environment for name in _OTHER_PLACES):
        return []
    found = [file.read_text(errors="replace").strip() for file in sorted(vendors.glob("*.icd"))]
    found += filter(None, environment.get(_MORE, "").split(":"))
    others = [library for library in found if "nvidia" not in library]
    if len(others) == len(found):
        return []
    added = {"OCL_ICD_VENDORS": str(hook_library().parent)}  # a folder without any
    if others or _MORE in environment:
        added[_MORE] = ":".join(dict.fromkeys(others))
    environment |= added
    return [f"{name}={value}" for name, value in added.items()]


def _use_software_gpu(choice: str) -> bool:
    if choice == "real":
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Unsupported(
                f"there is no CUDA driver ({error})",
                hint="install the NVIDIA driver, or use --gpu soft",
                reason=Reason.NO_GPU,
            ) from error
        return False
    return choice == "soft" or cuda.is_software()


def prepend(environment: dict[str, str], variable: str, path: Path) -> None:
    """Put ``path`` first in a variable that lists paths."""
    if ":" in str(path) or " " in str(path):
        raise CommandError(
            "Unsupported",
            f"{variable} cannot hold {path}: install phosd in a path without ':' and spaces",
        )
    before = environment.get(variable)
    environment[variable] = f"{path}:{before}" if before else str(path)


def _tell_of_hook_folder(settings: Settings, folder: Path) -> None:
    """Say it if the hook cannot make its socket, so that phosd does not find the program."""
    own = folder / str(os.getuid())  # phosd makes it for the first program that asks
    if not folder.is_dir():
        settings.note(f"phos: {folder} is not there: phosd finds the program once it is started")
    elif own.exists() and not os.access(own, os.W_OK | os.X_OK):
        settings.note(
            f"phos: {own} is not writable for you, so phosd will not find the hook of this "
            "program; remove that as root"
        )
