"""Mount a file system in memory for images: huge pages where the kernel has them.

phosd does it at its start. Under systemd its sandbox keeps it from mounting: there its unit runs
this file before, outside of the sandbox. So it imports nothing of phosd.
"""

import os
import subprocess
import sys
from pathlib import Path

# phosd limits itself to what it is told to use. Not noexec: CRIU runs its action script beside an
# image.
_OPTIONS = "mode=700,size=100%,nosuid,nodev"
_KINDS = (f"{_OPTIONS},huge=within_size", _OPTIONS)
"""Touching and pinning huge pages takes half as long. ``always`` would give one to each small file.
A kernel without them refuses the first kind.
"""


def mount(folder: Path) -> str:
    """Mount it at ``folder``, unless that is done already.

    Returns why it cannot be done, or an empty string.
    """
    why = ""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for options in _KINDS:
        if os.path.ismount(folder):
            return ""
        words = ["mount", "-t", "tmpfs", "-o", options, "phos-images", str(folder)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        except OSError as error:
            return f"mount: {error.strerror}"
        why = done.stderr.strip()
        if done.returncode == 0:
            return ""
    return why or f"mount failed with status {done.returncode}"


def unmount(folder: Path) -> str:
    """Unmount it, with all that is in it. Returns why that cannot be done, or an empty string.

    A data mover that ends only now may have packs mapped: their memory is free when it has ended.
    """
    words = ["umount", "--lazy", str(folder)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"umount: {error.strerror}"
    return "" if done.returncode == 0 else done.stderr.strip()


if __name__ == "__main__":
    sys.exit(mount(Path(sys.argv[1])) or 0)
