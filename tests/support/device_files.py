"""A device that CRIU alone can save neither open nor mapped, as NVIDIA's: here a block device."""

import os
import stat
from pathlib import Path

import pytest

from phosd.engine.system.cuda import is_software

LOOP = 7
"""The major number of loop devices, of which the first need not be set up to be opened."""


def pretend(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Make such a device in ``folder``, for all users; phosd takes it for the driver's. The real
    driver has devices of its own.
    """
    if not is_software():
        pytest.skip("the device belongs to the software GPU")
    device = folder / "device"
    os.mknod(device, stat.S_IFBLK, os.makedev(LOOP, 0))
    device.chmod(0o666)
    patch.setenv("PHOS_SOFTGPU_DEVICE_FILE", str(device))
    return device


def mapped(pid: int, device: Path) -> list[str]:
    """The lines of a process's memory map that name the device."""
    return [
        line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if str(device) in line
    ]


def opened(pid: int, device: Path) -> list[str]:
    """The links of a process's descriptors that lead to the device."""
    links = [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()]
    return [str(link) for link in links if link == device]
