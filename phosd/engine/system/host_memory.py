"""Read how much memory the host has, from ``/proc/meminfo``."""

from phosd.engine.system import procfs
from phosd.errors import Internal


def available_memory() -> int:
    """Return the bytes of host memory that are available without swapping."""
    return _field("MemAvailable")


def total_memory() -> int:
    """Return the bytes of host memory."""
    return _field("MemTotal")


def _field(name: str) -> int:
    for line in procfs.lines(procfs.PROC / "meminfo"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise Internal(f"/proc/meminfo has no {name}", hint="phosd needs Linux 3.14 or newer")
