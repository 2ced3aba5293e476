"""The containers that programs run in: which one a process is in, and the folders that it sees.

A runtime (podman, containerd, ...) gives a container a cgroup whose name has the container's id,
and, for its hook, a folder in memory of its own (docs/operate/containers.md). All that a container
has in its file systems is its root's, who need not be ours: it is looked at, and not believed.
"""

import ctypes
import functools
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from phosd.engine.system import cgroups, procfs

_OPENAT2 = 437
_HOW = struct.Struct("=QQQ")
_NO_MAGICLINKS, _NO_SYMLINKS, _IN_ROOT = 0x02, 0x04, 0x10

_ID = "[0-9a-f]{64}"
_OF_RUNTIMES = (
    ("podman", re.compile(rf"libpod-({_ID})(?:\.scope)?(?:/container)?")),
    ("docker", re.compile(rf"docker[-/]({_ID})(?:\.scope)?")),
    ("containerd", re.compile(rf"cri-containerd[-:]({_ID})(?:\.scope)?")),
    ("cri-o", re.compile(rf"crio-({_ID})(?:\.scope)?(?:/container)?")),
    ("kubernetes", re.compile(rf"kubepods.*/({_ID})")),
)
"""How the last part of a container's cgroup is named by the runtimes' drivers for cgroups."""
_POD = re.compile("pod([0-9a-f]{8}([-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
_SHOWN = 12
"""Characters of an id that runtimes show, and take for the whole."""


@dataclass(frozen=True)
class Container:
    """A container by its runtime's name for it; ``pod`` is the uid of its pod in Kubernetes, or
    empty.
    """

    runtime: str
    id: str
    pod: str = ""

    def __str__(self) -> str:
        return f"{self.runtime}:{self.id[:_SHOWN]}"


def container_of(pid: int) -> Container | None:
    """Return the container that a process is in; None if it is in none that has a name, or has
    ended.
    """
    if not is_apart(pid):
        return None
    return next(filter(None, map(_named, cgroups.memberships(pid).values())), None)


def _named(cgroup: str) -> Container | None:
    for runtime, form in _OF_RUNTIMES:
        if found := form.search(cgroup):
            pod = _POD.search(cgroup)
            return Container(runtime, found[1], pod[1].replace("_", "-") if pod else "")
    return None


def is_apart(pid: int) -> bool:
    """Return whether a process has a mount namespace that is not ours; False if it has ended."""
    try:
        return procfs.namespace(pid, "mnt") != procfs.namespace(os.getpid(), "mnt")
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def own_memory(pid: int, folder: str) -> Iterator[int | None]:
    """Open a file system in memory that is mounted at ``folder`` as a process in a container sees
    it, and is no other's; None if there is none there, or the process has ended.
    """
    found = _opened(pid, folder) if is_apart(pid) else None
    try:
        yield found
    finally:
        if found is not None:
            os.close(found)


def _opened(pid: int, folder: str) -> int | None:
    """Open it. No path is followed to anywhere but this mount: the container may have put links
    there.
    """
    try:
        device = _device_of_memory(pid, folder)
        if device is None:
            return None
        root = os.open(procfs.PROC / str(pid) / "root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            found = _openat2(root, folder.lstrip("/"))
        finally:
            os.close(root)
    except OSError:  # it has ended, or its container has something else there
        return None
    status = os.fstat(found)
    if status.st_dev != device or not stat.S_ISDIR(status.st_mode):
        os.close(found)
        return None
    return found


def _device_of_memory(pid: int, folder: str) -> int | None:
    """Return the device of the whole tmpfs that is mounted there last."""
    device = None
    for line in filter(None, procfs.lines(procfs.PROC / str(pid) / "mountinfo")):
        before, _, after = line.partition(" - ")
        _, _, numbers, root, place = before.split()[:5]
        if place == folder:
            major, minor = map(int, numbers.split(":"))
            whole = root == "/" and after.split()[0] == "tmpfs"
            device = os.makedev(major, minor) if whole else None
    return device


def _openat2(root: int, path: str) -> int:
    how = _HOW.pack(
        os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, 0, _IN_ROOT | _NO_SYMLINKS | _NO_MAGICLINKS
    )
    found: int = _libc().syscall(_OPENAT2, root, os.fsencode(path), how, len(how))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), path)
    return found


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
