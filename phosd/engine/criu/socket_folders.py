"""Find the folders that a restore needs because sockets of the tree are bound to a path in them.

A worker of Python's ``multiprocessing`` listens in a temporary folder, which it removes at its end:
by the time of a restore it is often gone, and CRIU does not make it. The fields are those of
``sk-unix.proto``.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from phosd.engine.criu.image_file import entries

_FILE_SOCKET = 16
_NAME, _DELETED = 11, 15


def socket_folders(folder: Path) -> tuple[str, ...]:
    """Return the folders of the bound unix sockets in CRIU's images.

    Raises :class:`~phosd.errors.Internal` for images that are not CRIU's.
    """
    found = {_folder_of(each) for each in entries(folder / "files.img", _FILE_SOCKET)}
    return tuple(sorted(found - {""}))


def _folder_of(socket: Mapping[int, int | bytes]) -> str:
    """Return the folder of a socket; empty unless its name is a path from the root."""
    name = socket.get(_NAME)
    if not isinstance(name, bytes) or not name.startswith(b"/") or socket.get(_DELETED):
        return ""
    return str(Path(os.fsdecode(name.rstrip(b"\0"))).parent)
