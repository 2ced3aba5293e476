"""Read which mounts a process sees, and which one an open file is on."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from phosd.engine.system import procfs

_ESCAPED = re.compile(r"\\([0-7]{3})")
"""What the kernel writes for blanks, line ends and backslashes in names."""


def mount_of(descriptor: int) -> int:
    """Return the id of the mount that an open file of ours is on; no file system is asked."""
    return int(procfs.fields_of(Path(f"/proc/self/fdinfo/{descriptor}"))["mnt_id"])


@contextmanager
def opened_unmounted(path: Path, flags: int = 0) -> Iterator[int | None]:
    """Open what is at ``path``, and is no link, as ``O_PATH`` and ``flags``; None if something
    is mounted there. No server of a file system is asked for anything. Raises :class:`OSError`.
    """
    with ExitStack() as files:
        above = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        files.callback(os.close, above)
        flags |= os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
        found = os.open(path.name, flags, dir_fd=above)
        files.callback(os.close, found)
        yield found if mount_of(found) == mount_of(above) else None


class Mount(NamedTuple):
    """A mount: its id, the ``st_dev`` of its files, what of the file system is its root, where a
    process sees it, and the type of the file system.
    """

    id: int
    device: int
    root: str
    place: str
    kind: str


def mounts(pid: int | Literal["self"]) -> Iterator[Mount]:
    """Yield every mount that ``pid`` sees, a later one above those before.

    Raises FileNotFoundError or ProcessLookupError if it has ended, also as a zombie.
    """
    try:
        lines = procfs.lines(procfs.PROC / str(pid) / "mountinfo")
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), str(pid)) from error
        raise
    for line in filter(None, lines):
        before, _, after = line.partition(" - ")
        # At blanks only, as :func:`lines`: of these the kernel escapes those in names.
        number, _, device, root, place = before.split(" ")[:5]
        major, minor = map(int, device.split(":"))
        yield Mount(int(number), os.makedev(major, minor), root, place, after.split(" ")[0])


def mount_types(pid: int) -> dict[int, str]:
    """Return the type of the file system of every mount that ``pid`` sees, by the mount's id."""
    return {mount.id: mount.kind for mount in mounts(pid)}


def kind_at(pid: int, path: str) -> str:
    """Return the type of the file system that ``pid`` sees at an absolute path without links."""
    kind, longest = "", -1
    for mount in mounts(pid):
        place = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), mount.place)
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= longest:  # a later one lies above those before
            kind, longest = mount.kind, len(place)
    return kind


def memory_devices() -> frozenset[int]:
    """Return the ``st_dev`` of every tmpfs that is mounted here."""
    return frozenset(mount.device for mount in mounts("self") if mount.kind == "tmpfs")
