"""Which GPUs a process in a container can open: those whose devices its runtime has made there."""

import stat
from pathlib import Path

from phosd.engine.system import containers
from phosd.engine.system.file_status import known_status
from phosd.engine.system.procfs import lines

_GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder of the driver for each GPU; there is none on a software GPU."""
_DEVICE = "/dev/nvidia{minor}"


def device_of(uuid: str) -> str:
    """Return the path of a GPU's device; empty if the driver does not tell."""
    for file in _GPUS.glob("*/information"):
        told = dict(line.split(":", 1) for line in lines(file) if ":" in line)
        told = {name.strip(): value.strip() for name, value in told.items()}
        if told.get("GPU UUID") == uuid and told.get("Device Minor", "").isdecimal():
            return _DEVICE.format(minor=told["Device Minor"])
    return ""


def sees(pid: int, uuid: str) -> bool:
    """Return whether a process can use a GPU: unless it is in a container without its device.

    Whether the container's cgroup allows it cannot be asked.
    """
    if not containers.is_apart(pid) or not (path := device_of(uuid)):
        return True
    try:
        here = Path(path).stat().st_rdev
    except FileNotFoundError:  # there is nothing to compare with
        return True
    with containers.opened(pid, path) as found:
        status = None if found is None else known_status(Path(f"/proc/self/fd/{found}"))
    return status is not None and stat.S_ISCHR(status.st_mode) and status.st_rdev == here
