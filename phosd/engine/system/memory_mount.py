"""Mount a file system in memory for images: huge pages where the kernel has them.

    memory_mount.py mount|unmount FOLDER

phosd does it at its start. Under systemd its sandbox keeps it from mounting: there
``phosd-memory.service`` runs this file before. So it imports nothing of phosd, and needs no
``mount(8)``, which small systems lack.
"""

import ctypes
import os
import sys
from pathlib import Path

_SOURCE = b"phos-images"
# phosd limits itself to what it is told to use. Not noexec: CRIU runs its action script beside an
# image.
_OPTIONS = "mode=700,size=100%"
_KINDS = (f"{_OPTIONS},huge=within_size", _OPTIONS)
"""Touching and pinning huge pages takes half as long. ``always`` would give one to each small file.
A kernel without them refuses the first kind.
"""
_NOSUID, _NODEV, _DETACH = 2, 4, 2
"""``sys/mount.h``"""


def mount(folder: Path) -> str:
    """Mount it at ``folder``, unless that is done already.

    Returns why it cannot be done, or an empty string.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.path.ismount(folder):
        return ""
    why = ""
    for options in _KINDS:
        why = _call("mount", _SOURCE, bytes(folder), b"tmpfs", _NOSUID | _NODEV, options.encode())
        if not why:
            break
    return why


def unmount(folder: Path) -> str:
    """Unmount it, with all that is in it. Returns why that cannot be done, or an empty string.

    A data mover that ends only now may have packs mapped: their memory is free when it has ended.
    """
    return _call("umount2", bytes(folder), _DETACH)


def _call(name: str, *arguments: bytes | int) -> str:
    """Call a function of the C library; return its error, or an empty string."""
    library = ctypes.CDLL(None, use_errno=True)
    return os.strerror(ctypes.get_errno()) if library[name](*arguments) else ""


if __name__ == "__main__":
    sys.exit({"mount": mount, "unmount": unmount}[sys.argv[1]](Path(sys.argv[2])) or 0)
