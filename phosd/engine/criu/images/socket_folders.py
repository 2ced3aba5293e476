"""Find the folders that a restore needs because sockets of the tree are bound to a path in them.

A worker of Python's ``multiprocessing`` listens in a temporary folder, which it removes at its end:
by the time of a restore it is often gone, and CRIU does not make it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from phosd.engine.criu.images.fields import FileEntry, UnixSkEntry
from phosd.engine.criu.images.image_file import entries


def socket_folders(folder: Path) -> tuple[str, ...]:
    """Return the folders of the bound unix sockets in CRIU's images.

    Raises :class:`~phosd.errors.Internal` for images that are not CRIU's.
    """
    found = {_folder_of(each) for each in entries(folder / "files.img", FileEntry.USK)}
    return tuple(sorted(found - {""}))


def _folder_of(socket: Mapping[int, int | bytes]) -> str:
    """Return the folder of a socket; empty unless its name is a path from the root."""
    name = socket.get(UnixSkEntry.NAME)
    if not isinstance(name, bytes) or not name.startswith(b"/") or socket.get(UnixSkEntry.DELETED):
        return ""
    return str(Path(os.fsdecode(name.rstrip(b"\0"))).parent)
