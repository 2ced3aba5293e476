"""Copy an image that a process has loaded, as the user who owns the process: a user names the file,
which may be anything on any file system, and memory that may be a file's.

    python -m phosd.engine.kernels.reader ORDERS SOURCE COPY

ORDERS is JSON (:class:`Orders`), the others are descriptors: of the process's memory or of its root
folder, and of the file for the copy. It exits with 1 for what cannot be read, and may be killed.
"""

import errno
import os
import stat
import sys

import msgspec

from phosd.engine.analysis.code import cage
from phosd.engine.system.in_root import place_in_root
from phosd.engine.system.privileges import become

_PIECE = 4 << 20
_PROCESSOR_SECONDS = 30


class Orders(msgspec.Struct, frozen=True):
    """Whose the process is, and what to copy: ``size`` bytes at an ``address`` of its memory, or of
    the file at ``path`` in its root folder if there is one.
    """

    uid: int
    gid: int
    groups: tuple[int, ...]
    address: int
    size: int
    path: str = ""


def main() -> None:
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    source, copy = map(int, sys.argv[2:4])
    parent = os.getppid()
    cage.give_way()
    if os.geteuid() == 0:
        become(orders.uid, orders.gid, orders.groups)
    cage.limit(_PROCESSOR_SECONDS, 1 << 32, orders.size)
    cage.confine()
    cage.end_with(parent)
    try:
        if orders.path:
            source = _opened(source, orders.path, orders.size)
        _copy(source, 0 if orders.path else orders.address, orders.size, copy)
    except OSError as error:
        sys.exit(error.strerror or str(error))


def _opened(root: int, path: str, size: int) -> int:
    """Open a plain file of a size, as the process would. Raises :class:`OSError`."""
    place = place_in_root(root, path, links=True)
    status = os.fstat(place)
    if not stat.S_ISREG(status.st_mode) or status.st_size != size:
        raise OSError(errno.ESTALE, "it is another file now")
    return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)


def _copy(source: int, offset: int, size: int, copy: int) -> None:
    done = 0
    while done < size:
        part = os.pread(source, min(size - done, _PIECE), offset + done)
        if not part:
            raise OSError(errno.ESTALE, "it is shorter now")
        os.write(copy, part)
        done += len(part)


if __name__ == "__main__":
    main()
